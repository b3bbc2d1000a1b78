"""The number of frames of a message."""

import math


def frame_count(message_bytes: float, frame_bytes: int) -> int:
    """Return how many frames a message is cut into, as `engine/src/transmit/scheduler.rs` cuts it.

    A rest of up to an eighth of a frame goes with the last one.

    Args:
        message_bytes: a slice's gradient or result, as it is sent.
        frame_bytes: the usual payload of a frame.
    """
    return max(1, math.ceil((message_bytes - frame_bytes // 8) / frame_bytes))

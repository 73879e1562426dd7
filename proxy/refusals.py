"""What a worker's answer other than "ok" means to the client. Pure."""

from __future__ import annotations

from typing import assert_never

from gpusup.worker.wire import Answer

from .errors import (
    DeadlineExceeded,
    InputTooLarge,
    InvalidInput,
    ModelFailed,
    NoWorker,
    OutOfMemory,
    ProxyError,
)


def refusal(answer: Answer, retry_after_s: int) -> ProxyError:
    text = answer.text
    match answer.status:
        case "invalid":
            return InvalidInput(text or "the model refused this input")
        case "unsupported":
            return Unsupported(text or "the model does not do this")
        case "too_large":
            return InputTooLarge(text or "the input is too large for the device")
        case "oom":
            return OutOfMemory(text or "the device ran out of memory", retry_after_s=retry_after_s)
        case "expired":
            return DeadlineExceeded(
                text or "the deadline passed at the worker", headers={"x-should-retry": "false"}
            )
        case "failed":
            return ModelFailed(text or "the model failed")
        case "busy" | "draining" | "cancelled" | "ok":
            # Handled before; a worker that says so anyway has not computed anything.
            return NoWorker(
                f"the worker did not take the request ({answer.status})",
                retry_after_s=retry_after_s,
            )
        case _:
            assert_never(answer.status)


class Unsupported(InvalidInput):
    code = "UNSUPPORTED"

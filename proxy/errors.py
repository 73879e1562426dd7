"""What a client is told when it can't be served. Each class knows its own status and code."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

_encode = msgspec.json.Encoder().encode


class ProxyError(Exception):
    """`str(error)` goes to the client. `retry_after_s`: whole seconds, at least 1, or None.

    `headers` are added to the answer, `extra` to its body; `close` ends the connection after it
    (the rest of a body was not read, or the process is leaving).
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "INTERNAL"
    close: ClassVar[bool] = False

    def __init__(
        self,
        text: str,
        *,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.headers = headers or {}
        self.extra = extra or {}

    def body(self, request_id: str) -> bytes:
        """The JSON object of the raw and v2 surfaces."""
        told: dict[str, Any] = {
            "error": str(self),
            "code": self.code,
            "request_id": request_id,
            **self.extra,
        }
        if self.retry_after_s is not None:
            told["retry_after_s"] = self.retry_after_s
        return _encode(told)

    def all_headers(self) -> dict[str, str]:
        """What the answer that says so carries, its media type included."""
        headers = {"Content-Type": "application/json", **self.headers}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.close:
            headers["Connection"] = "close"
        return headers


class Internal(ProxyError):
    """Ours to mend: the log has where, the client only that."""


# -- the request itself ---------------------------------------------------------------------------


class InvalidInput(ProxyError):
    status = 400
    code = "INVALID_INPUT"


class BrokenBody(ProxyError):
    status = 400
    code = "BROKEN_BODY"
    close = True


class Unauthorized(ProxyError):
    status = 401
    code = "UNAUTHORIZED"


class Forbidden(ProxyError):
    status = 403
    code = "FORBIDDEN"


class NotFound(ProxyError):
    status = 404
    code = "NOT_FOUND"


class ModelNotFound(ProxyError):
    status = 404
    code = "MODEL_NOT_FOUND"


class MethodNotAllowed(ProxyError):
    status = 405
    code = "METHOD_NOT_ALLOWED"


class NotAcceptable(ProxyError):
    status = 406
    code = "NOT_ACCEPTABLE"


class BodyTimeout(ProxyError):
    status = 408
    code = "BODY_TIMEOUT"
    close = True


class BodyTooLarge(ProxyError):
    status = 413
    code = "BODY_TOO_LARGE"
    close = True


class InputTooLarge(ProxyError):
    """The body was read, but the input can't be computed here: it would never fit."""

    status = 413
    code = "INPUT_TOO_LARGE"


class UnsupportedMedia(ProxyError):
    status = 415
    code = "UNSUPPORTED_MEDIA_TYPE"
    close = True


class ExpectationFailed(ProxyError):
    status = 417
    code = "EXPECTATION_FAILED"
    close = True


class InputRefused(ProxyError):
    """This very input was executing when two workers died."""

    status = 422
    code = "INPUT_REFUSED"


class NotImplementedHere(ProxyError):
    status = 501
    code = "NOT_IMPLEMENTED"
    close = True


# -- the service ----------------------------------------------------------------------------------


class QueueFull(ProxyError):
    status = 429
    code = "QUEUE_FULL"


class ModelFailed(ProxyError):
    """The handler raised."""

    status = 500
    code = "MODEL_FAILED"


class WorkerLost(ProxyError):
    status = 502
    code = "WORKER_LOST"


class NoWorker(ProxyError):
    status = 503
    code = "NO_WORKER"


class ShedLoad(ProxyError):
    status = 503
    code = "SHED"


class OutOfMemory(ProxyError):
    status = 503
    code = "GPU_OUT_OF_MEMORY"


class ArenaFull(ProxyError):
    status = 503
    code = "BODY_MEMORY_FULL"
    close = True


class Draining(ProxyError):
    status = 503
    code = "DRAINING"
    close = True


class SupervisorLost(ProxyError):
    status = 503
    code = "SUPERVISOR_LOST"


class DeadlineExceeded(ProxyError):
    status = 504
    code = "DEADLINE_EXCEEDED"

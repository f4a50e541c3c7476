"""Errors on the wire: a `MillraceError` becomes a gRPC status, and at the caller the same error again."""

import grpc

from millrace import errors

CODES: dict[type[errors.MillraceError], grpc.StatusCode] = {
    errors.InvalidJob: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadRow: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Fenced: grpc.StatusCode.ABORTED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.PublicationFailed: grpc.StatusCode.DATA_LOSS,
    errors.NonFinite: grpc.StatusCode.OUT_OF_RANGE,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PartialOutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PartialStep: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Untrusted: grpc.StatusCode.UNAUTHENTICATED,
    errors.MillraceError: grpc.StatusCode.INTERNAL,
}
_BY_NAME = {kind.__name__: kind for kind in CODES}
LONGEST_WHAT, LONGEST_FIX = 3000, 3000
"""Bytes of an error's texts on the wire: a status travels in HTTP/2 headers, whose size is limited, and a byte that is
no ASCII takes three."""
_NAME, _FIX, _CULPRITS = "millrace-error", "millrace-fix-bin", "millrace-culprits-bin"


def status_of(error: errors.MillraceError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Code, details and trailing metadata for `error`."""
    kind = next(k for k in type(error).__mro__ if k in CODES)
    culprits = ",".join(getattr(error, "culprits", ()))
    fix = _shortened(error.fix, LONGEST_FIX).encode()
    trailing = ((_NAME, kind.__name__), (_FIX, fix), (_CULPRITS, culprits.encode()))
    return CODES[kind], _shortened(error.what, LONGEST_WHAT), trailing


def _shortened(text: str, most: int) -> str:
    """The text with at most `most` bytes of its UTF-8."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= most else data[:most].decode("utf-8", "ignore") + " …"


def answered(call: grpc.aio.AioRpcError) -> bool:
    """Whether the error of a failed call is the server's own."""
    return _NAME in dict(call.trailing_metadata() or ())


def error_of(call: grpc.aio.AioRpcError, address: str, method: str, deadline_s: float) -> errors.MillraceError:
    """The error of a failed call, for its caller. An error that is not the server's own names method and address."""
    trailing = dict(call.trailing_metadata() or ())
    kind = _BY_NAME.get(str(trailing.get(_NAME, "")))
    if kind is errors.PublicationFailed:
        culprits = tuple(c for c in bytes(trailing[_CULPRITS]).decode().split(",") if c)
        return errors.PublicationFailed(call.details() or "", bytes(trailing[_FIX]).decode(), culprits)
    if kind is not None:
        return kind(call.details() or "", bytes(trailing[_FIX]).decode())
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.Unavailable(
            f"{method} at {address} did not answer within {deadline_s:g} s.", f"look at {address}."
        )
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # a server that stops cancels its calls
        return errors.Unavailable(f"{address} cannot be reached for {method}: {call.details()}.", "check that it runs.")
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return errors.InvalidState(f"{address} refused {method}: {call.details()}", "set the same MILLRACE_TOKEN.")
    if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.InvalidRequest(f"{address} refused {method}: {call.details()}", "send less.")
    if call.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.InvalidState(f"{address} does not know {method}.", "run the same release of millrace everywhere.")
    return errors.MillraceError(f"{method} at {address} failed with {call.code().name}: {call.details()}")

"""Causes of failed requests of an object store, by class, code and status of the provider's error.

The words of an error are never searched: a path in it may hold "token", "denied" or "connect".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    """A cause of failed requests, and what the user can do.

    Args:
        fix: the cure.
        may_pass: whether the same request may succeed later.
        classes: names of error classes; a subclass counts as its class.
        codes: error codes of S3 in replies.
        statuses: HTTP statuses of replies.
    """

    fix: str
    may_pass: bool
    classes: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    statuses: frozenset[int] = frozenset()


SETTINGS = Cause(
    "name a profile, region and endpoint that exist (AWS_PROFILE, ~/.aws/config, or the "
    "provider's own; docs/remote_storage.md)",
    may_pass=False,
    classes=frozenset(
        {
            "ProfileNotFound",
            "ConfigNotFound",
            "ConfigParseError",
            "InvalidConfigError",
            "InvalidRegionError",
            "NoRegionError",
        }
    ),
)
DENIED = Cause(
    "give credentials with this right in the provider's usual place, and check the clock of this "
    "machine",
    may_pass=False,
    classes=frozenset(
        {
            "PermissionError",
            # botocore
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "NoAuthTokenError",
            "TokenRetrievalError",
            "SSOError",
            # google.auth, azure.core, huggingface_hub
            "DefaultCredentialsError",
            "RefreshError",
            "ClientAuthenticationError",
            "GatedRepoError",
            "LocalTokenNotFoundError",
        }
    ),
    codes=frozenset(
        {
            "AuthorizationHeaderMalformed",
            "CredentialsNotSupported",
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidToken",
            "MissingSecurityElement",
            "MissingSecurityHeader",
            "TokenRefreshRequired",
            "UnrecognizedClientException",
        }
    ),
    statuses=frozenset({401, 403}),
)
NETWORK = Cause(
    "check the network, and the endpoint that the provider's variables name "
    "(docs/remote_storage.md)",
    may_pass=True,
    classes=frozenset(
        {
            # Python, of which a failed look-up of a name is a gaierror; botocore has the same names
            "ConnectionError",
            "TimeoutError",
            "gaierror",
            "SSLError",
            # botocore, aiohttp, requests and httpx, azure.core, google.auth
            "HTTPClientError",
            "ClientConnectionError",
            "ClientPayloadError",
            "Timeout",
            "ServiceRequestError",
            "ServiceResponseError",
            "TransportError",
        }
    ),
)
OTHER = Cause("try again; everything committed before is unchanged", may_pass=True)


def cause_of(error: BaseException) -> Cause:
    """The cause of a failed request."""
    for part in _chain(error):
        names = {kind.__name__ for kind in type(part).__mro__}
        for cause in (SETTINGS, DENIED, NETWORK):
            if (
                cause.classes & names
                or _code(part) in cause.codes
                or _status(part) in cause.statuses
            ):
                return cause
    return OTHER


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _code(error: BaseException) -> str | None:
    """The error code in a reply of S3."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    return str(response.get("Error", {}).get("Code"))


def _status(error: BaseException) -> int | None:
    """The HTTP status of a reply, under the name that a provider gives it."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)
    for name in ("status_code", "status", "code"):
        status = status or getattr(error, name, None)
    return int(status) if str(status).isdigit() else None

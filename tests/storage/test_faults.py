"""A provider's error is understood by its class, code and status, whatever its words are."""

import socket

import pytest

from nanotrain.storage.faults import DENIED, NETWORK, OTHER, SETTINGS, cause_of

botocore = pytest.importorskip("botocore.exceptions")

URL = "http://127.0.0.1:9/bucket/connect/denied/signature/token/credential/profile.json"


def reply(code: str, status: int) -> Exception:
    body = {"Error": {"Code": code, "Message": URL}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.ClientError(body, "PutObject")


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class AzureError(Exception):
    status_code = 403


class HubError(Exception):
    response = type("Response", (), {"status_code": 401})()


class GoogleError(Exception):
    code = 503


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (botocore.EndpointConnectionError(endpoint_url=URL), NETWORK),
        (botocore.ConnectTimeoutError(endpoint_url=URL), NETWORK),
        (botocore.ReadTimeoutError(endpoint_url=URL), NETWORK),
        (botocore.SSLError(endpoint_url=URL, error="x"), NETWORK),
        (botocore.ConnectionClosedError(endpoint_url=URL), NETWORK),
        (ConnectionResetError(URL), NETWORK),
        (socket.gaierror(URL), NETWORK),
        (TimeoutError(URL), NETWORK),
        (raised_from(OSError(URL), ConnectionRefusedError(URL)), NETWORK),
        (botocore.NoCredentialsError(), DENIED),
        (botocore.PartialCredentialsError(provider="env", cred_var="x"), DENIED),
        (botocore.UnauthorizedSSOTokenError(), DENIED),
        (PermissionError("x"), DENIED),
        (reply("AccessDenied", 403), DENIED),
        (reply("ExpiredToken", 400), DENIED),
        (raised_from(OSError(5, "x"), reply("InvalidToken", 400)), DENIED),
        (AzureError(URL), DENIED),
        (HubError(URL), DENIED),
        (botocore.ProfileNotFound(profile="typo"), SETTINGS),
        (botocore.NoRegionError(), SETTINGS),
        (reply("InternalError", 500), OTHER),
        (reply("SlowDown", 503), OTHER),
        (raised_from(OSError(5, URL), reply("InternalError", 500)), OTHER),
        (GoogleError(URL), OTHER),
        (OSError(URL), OTHER),
        (EOFError(f"10 of 20 bytes of {URL} arrived"), OTHER),
    ],
)
def test_the_class_the_code_or_the_status_decides(error: Exception, cause: object) -> None:
    assert cause_of(error) is cause

"""Define the tool that fetches a web page. The user must permit each address.

Only public IP addresses are allowed. The connection uses the IP address that was checked, because a second DNS lookup
might return a private one. A redirect to another origin is not followed but reported to the model, because the user
must permit the new address, too.
"""

from __future__ import annotations

import asyncio
import codecs
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notso.system.confinement import ConfinedWorkError
from notso.system.processes import is_public_address
from notso.web.tools.chat_tool import ChatTool, ToolContext, arguments_schema
from notso.web.tools.page_text import page_text
from notso.web.values.errors import ToolError

if TYPE_CHECKING:
    import httpx2

MAX_BYTES = 1 << 20
SECONDS = 15.0
CONNECT_SECONDS = 5.0
MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
HEADERS = {
    "User-Agent": "notso",
    "Accept": "text/html, text/*;q=0.9, application/json;q=0.8",
    "Accept-Encoding": "identity",
}
_TEXTS = ("text/", "application/json", "application/xml", "application/xhtml+xml", "application/ld+json")


async def _run(arguments: Mapping[str, Any], context: ToolContext) -> str:
    address = arguments["url"].strip()
    for _ in range(MAX_REDIRECTS + 1):
        url = parse_url(address)
        host, port = url.raw_host.decode(), url.port or PORTS[url.scheme]
        try:
            async with asyncio.timeout(SECONDS):
                target, text = await _get(url, await resolve_public_address(host, port))
        except TimeoutError:
            raise ToolError(f"the page was not received within {SECONDS:g} s") from None
        if target is None:
            return text
        if (target.scheme, target.host, target.port) != (url.scheme, url.host, url.port):
            return f"The page redirects to {target}. Fetch that address if you need it."
        address = str(target)
    raise ToolError("the page redirects too often")


def parse_url(text: str) -> httpx2.URL:
    """Parse an http(s) address. Raises ToolError if it is invalid or has credentials or a nonstandard port."""
    try:
        import httpx2  # imported here, because the server must also start without this package
    except ModuleNotFoundError:
        raise ToolError("pages cannot be fetched: the package httpx2 is not installed here") from None
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, ValueError):
        raise ToolError("this is not a valid address") from None
    if url.scheme not in PORTS or not url.host:
        raise ToolError("only http:// and https:// addresses can be fetched")
    if url.userinfo:
        raise ToolError("an address must not contain a user name or password")
    if url.port not in (None, *PORTS.values()):
        raise ToolError("only ports 80 and 443 are allowed")
    return url


async def resolve_public_address(host: str, port: int) -> str:
    """Resolve a host. Raises ToolError unless all of its addresses are public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ToolError(f"the host {host} cannot be found") from None
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    if not addresses or not all(map(is_public_address, addresses)):
        raise ToolError(f"{host} is not a public address, so it is not fetched")
    return addresses[0]


async def _get(url: httpx2.URL, address: str) -> tuple[httpx2.URL | None, str]:
    import httpx2

    pinned = url.copy_with(host=address)
    # `url.host` is unsuitable: it lacks the brackets of IPv6 addresses, and decodes international names.
    headers, sni = {**HEADERS, "Host": url.netloc.decode()}, url.raw_host.decode()
    timeout = httpx2.Timeout(SECONDS, connect=CONNECT_SECONDS)
    async with httpx2.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False) as client:
        request = client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": sni})
        try:
            response = await client.send(request, stream=True)
            try:
                location, text = await _read(response)
                return url.join(location) if location else None, text
            finally:
                await response.aclose()
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ToolError(f"the page cannot be fetched: {type(error).__name__}") from None


async def _read(response: httpx2.Response) -> tuple[str, str]:
    if response.is_redirect and (location := response.headers.get("location")):
        return location, ""
    if response.status_code != 200:
        raise ToolError(f"the server answers with status {response.status_code}")
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith(_TEXTS):
        raise ToolError(f"the page is not text but {kind or 'of an unknown type'}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise ToolError("the server sent a compressed page, which was not requested")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_BYTES:
            raise ToolError(f"the page has more than {MAX_BYTES:,} bytes")
    text = _decode(bytes(body), response.charset_encoding or "utf-8")
    if kind not in ("text/html", "application/xhtml+xml"):
        return "", text
    try:
        return "", await page_text(text)
    except ConfinedWorkError:
        raise ToolError("the page takes too much time or memory to read") from None


def _decode(body: bytes, charset: str) -> str:
    try:
        # The punycode codec takes quadratic time: a page of MAX_BYTES would block the event loop for minutes.
        is_label = codecs.lookup(charset).name == "punycode"
        return body.decode("utf-8" if is_label else charset, "replace")
    except (LookupError, ValueError):  # an unknown codec, or one that does not support "replace", such as idna
        return body.decode("utf-8", "replace")


FETCH = ChatTool(
    name="fetch_page",
    description="Read the text of one public web page. The user is asked for each address.",
    parameters=arguments_schema({"url": ("string", "http(s) address of the page")}, "url"),
    run=_run,
    seconds=SECONDS * (MAX_REDIRECTS + 1) + 10,
    always_asks=True,
)

"""The configuration file for sign-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from notso.web.values.errors import SettingsError, UnsafeBindError
from notso.web.values.settings import Settings
from notso.web.values.sign_in import OidcSettings, ProxySignIn, SignInSettings, read_sign_in

WHOLE = """
require_key = true
operators = ["ann@example.org"]
[proxy]
header = "X-Forwarded-User"
addresses = ["127.0.0.1", "10.0.0.0/8"]
[oidc]
issuer = "https://login.example.org"
client_id = "notso"
client_secret_file = "SECRET"
public_url = "https://chat.example.org"
claim = "email"
allowed = ["*@example.org"]
"""


def test_complete_sign_in_file_is_read(tmp_path: Path) -> None:
    path, secret = tmp_path / "sign-in.toml", tmp_path / "secret"
    secret.write_text("hush\n")
    path.write_text(WHOLE.replace("SECRET", str(secret)))
    found = read_sign_in(path)
    assert found.require_key and found.operators == ("ann@example.org",) and found.requires_authentication
    assert found.proxy == ProxySignIn(header="X-Forwarded-User", addresses=("127.0.0.1", "10.0.0.0/8"))
    assert found.oidc is not None and found.oidc.secret() == "hush" and found.oidc.allows("b@example.org")
    assert (
        "hush"
        not in repr(found)
        + repr(OidcSettings(issuer="https://a.b", client_id="x", public_url="https://c.d", client_secret="hush"))
        and not SignInSettings().requires_authentication
    )


def test_allowed_domain_matches_in_any_case() -> None:
    oidc = OidcSettings(
        issuer="https://a.b", client_id="x", public_url="https://c.d", allowed=("*@Example.org", "bob@a.b")
    )
    assert all(map(oidc.allows, ("Ann@EXAMPLE.org", "ann@example.org", "bob@a.b", "bob@A.B")))
    assert not any(map(oidc.allows, ("Bob@a.b", "Bob", "ann@a.example.org", "example.org", "ann@example.orgs")))


def test_client_secret_file_is_relative_to_sign_in_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the secrets file is relative to the configuration file, not to the working directory."""
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "oidc-secret").write_text("hush\n")
    (folder / "sign-in.toml").write_text(WHOLE.replace("SECRET", "oidc-secret"))
    monkeypatch.chdir(tmp_path)
    oidc = read_sign_in(Path("settings/sign-in.toml")).oidc
    assert oidc is not None and oidc.secret() == "hush"


def test_rules_change_only_with_access_settings() -> None:
    def rules(operators: tuple[str, ...] = (), **given: object) -> str:
        oidc = {"issuer": "https://a.b", "client_id": "x", "public_url": "https://c.d"} | given
        return SignInSettings(operators=operators, oidc=OidcSettings(**oidc)).rules  # type: ignore[arg-type]

    others = (rules(("ann",)), rules(allowed=("ann",)), rules(claim="email"), rules(issuer="https://e.f"))
    assert len({rules(), SignInSettings().rules, *others}) == 6
    assert rules() == rules(client_secret_file="elsewhere") == rules(public_url="https://g.h")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = [", "sign-in.toml"),
        ("requires_key = true", "requires_key is unknown; available: require_key"),
        ("require_key = 1", "require_key must be true or false"),
        ("operators = 'ann'", "operators must be a list of strings"),
        ("proxy = 1", "[proxy]"),
        ("[proxy]\nheader = 'X'", "is missing addresses"),
        ("[proxy]\nheader = 'X'\naddresses = []", "must list the addresses of the proxies"),
        ("[proxy]\nheader = 'X: y'\naddresses = ['::1']", "is not a header name"),
        ("[proxy]\nheader = 'X'\naddresses = ['me']", "'me' is neither an address nor a network"),
        ("[proxy]\nheader = 'X'\naddresses = ['10.0.0.5/8']", "write 10.0.0.5 for the address or 10.0.0.0/8 for"),
        ("[proxy]\nheader = 'X'\naddresses = ['0.0.0.0/0']", "anyone could then claim any name"),
        ("[proxy]\nheader = 'X'\naddresses = ['::ffff:0:0/96']", "anyone could then claim any name"),
        ("[oidc]\nissuer = 'https://[::1'\nclient_id = 'x'\npublic_url = 'https://c.d'", "issuer must be a URL"),
        ("[oidc]\nissuer = 'https://a.b:x'\nclient_id = 'x'\npublic_url = 'https://c.d'", "issuer must be a URL"),
        ("[oidc]\nissuer = 'https://a.b'\nclient_id = 'x'", "is missing public_url"),
        ("[oidc]\nissuer = 'http://a.b'\nclient_id = 'x'\npublic_url = 'https://c.d'", "issuer must be an https URL"),
        ("[oidc]\nissuer = 'https://a.b'\nclient_id = 'x'\npublic_url = 'c.d'", "public_url must be a URL"),
        ("[oidc]\nissuer = 'https://a.b'\nclient_id = 'x'\npublic_url = 'https://c.d'\nscope = 'email'", "openid"),
    ],
)
def test_invalid_sign_in_file_is_rejected_with_reason(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "sign-in.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as refusal:
        read_sign_in(path)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("sign-in: ")


def test_missing_sign_in_or_secret_file_raises_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none cannot be read: No such file or directory$"):
        read_sign_in(tmp_path / "none")
    oidc = OidcSettings(issuer="https://a.b", client_id="x", public_url="https://c.d", client_secret_file="/none/such")
    with pytest.raises(SettingsError, match=r"^sign-in: \[oidc\] /none/such cannot be read$"):
        oidc.secret()


def test_bind_beyond_loopback_requires_sign_in() -> None:
    with pytest.raises(UnsafeBindError):
        Settings(host="0.0.0.0", sign_in=SignInSettings(operators=("ann",)))
    assert Settings(host="0.0.0.0", sign_in=SignInSettings(require_key=True)).requires_authentication
    assert Settings(host="0.0.0.0", sign_in_plugin="doorman").requires_authentication


def test_kept_characters_must_be_non_negative_integer(tmp_path: Path) -> None:
    file = tmp_path / "sign-in.toml"
    file.write_text("kept_characters = 0")
    assert read_sign_in(file).kept_characters == 0
    for wrong in ("-1", "true", "1.5", '"1"'):
        file.write_text(f"kept_characters = {wrong}")
        with pytest.raises(SettingsError, match="must be an integer"):
            read_sign_in(file)

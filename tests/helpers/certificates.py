"""Certificates for tests of TLS, from authorities that a test makes."""

from datetime import datetime
from pathlib import Path

import trustme

from router.tls import INNER_NAME, InnerTls


def inner_tls(
    ca: trustme.CA,
    folder: Path,
    *,
    name: str = INNER_NAME,
    trusts: trustme.CA | None = None,
    not_before: datetime | None = None,
    not_after: datetime | None = None,
) -> InnerTls:
    """Return files of inner TLS, written anew into a folder.

    Args:
        ca: signs the certificate.
        folder: made where it is not there.
        name: in the certificate.
        trusts: authority of the other sides; None: the same.
        not_before, not_after: when the certificate holds; None: since long, and for long.
    """
    folder.mkdir(exist_ok=True)
    cert = ca.issue_cert(name, not_before=not_before, not_after=not_after)
    (folder / "tls.key").write_bytes(cert.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    (folder / "ca.crt").write_bytes((trusts or ca).cert_pem.bytes())
    return InnerTls(cert_file=str(folder / "tls.crt"), key_file=str(folder / "tls.key"), ca_file=str(folder / "ca.crt"))

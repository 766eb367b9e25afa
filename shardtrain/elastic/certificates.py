"""How islands know each other: each makes a certificate, and the run folder lists them all. No sockets."""

import datetime
import secrets
import ssl
import tempfile

from shardtrain.elastic.run_files import RunFiles
from shardtrain.errors.messages import needs_library

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
    from cryptography.x509.oid import NameOID
except ImportError as error:
    raise ImportError(needs_library("messages of elastic islands are", "cryptography", "elastic")) from error


class Certificates:
    """The certificate of an island, written to the run folder, and those of others.

    Args:
      name: of the island, new in the run.
      files: the run folder.

    Attributes:
      server: the TLS of connections that others make.
      client: the TLS of connections that this island makes.

    Raises:
      ValueError: the name cannot be that of a file.
      FileExistsError: the name is not new.
    """

    def __init__(self, name: str, files: RunFiles) -> None:
        self.name, self._files = name, files
        certificate, key, password = make_certificate()
        files.write_certificate(name, certificate)
        # the library reads files only: the key in it is encrypted, and the password is in memory alone
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + key)
            file.flush()
            self.server = _open_context(ssl.PROTOCOL_TLS_SERVER, file.name, password)
            self.client = _open_context(ssl.PROTOCOL_TLS_CLIENT, file.name, password)
        self.server.num_tickets = 0  # each connection shows its certificate

    def find(self, peer: str) -> bytes | None:
        """Return the certificate (DER) of an island, accepted from now on; None if the folder lists none.

        Whoever accepts a connection must compare: the TLS lets in all certificates that were found.

        Raises:
          OSError: it cannot be read.
          ValueError: it is none, or the name cannot be that of a file.
        """
        text = self._files.read_certificate(peer)
        if text is None:
            return None
        for context in (self.server, self.client):
            context.load_verify_locations(cadata=text)
        return ssl.PEM_cert_to_DER_cert(text)


def make_certificate() -> tuple[bytes, bytes, bytes]:
    """Return a new certificate and its private key as PEM, and the password that encrypts the key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, secrets.token_hex(16))])
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        # clocks of hosts differ; who may come in is what the folder lists
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    password = secrets.token_hex(16).encode()
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    return certificate.public_bytes(Encoding.PEM), encrypted, password


def _open_context(protocol: int, path: str, password: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(path, password=password)
    return context

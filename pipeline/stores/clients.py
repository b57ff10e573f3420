"""Clients of object stores: obstore for s3, gs and az, fsspec for hf, which is read only.

Credentials come from the sources that a store's own tools use (environment, ~/.aws, roles, gcloud's and Azure's login)
and are renewed before they expire. They are never a part of a URL or of an error. Requests are retried with back-off up
to a limit, and then raise a one-line error.

TLS detects bytes that change on their way. Over an `http://` endpoint a whole object is compared with its ETag if that
is an MD5 (S3 and Google give that of what was written in one request). Parts of an object, and one without such a mark,
can only be read twice, which is done with what has no checksum of ours: input files.
"""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.fields import Fields

RETRIES = 10
RETRY_SECONDS = 60.0  # total time of a request with its retries
_FEWEST_OF_A_PAGE = 100  # objects in each answer of a listing but the last; S3 and Google give 1,000, Azure 5,000
_MOST_OF_A_NAME = 4  # objects that the library lists by one name: it leaves out slashes at the beginning and the end
_LAST_LETTER = "\U0010ffff"
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # first and maximum seconds between two tries: doubled, with jitter
_CONNECT_SECONDS, _SILENT_SECONDS = 5, 30  # timeouts of connecting and of an idle connection
_REQUEST_SECONDS = 300  # 128 MiB at 4 Mbit/s
_BODY_TRIES = 5  # retries of responses that end too soon
_CREDENTIAL_SECONDS = 600  # botocore renews expiring credentials 15 minutes before, when they are requested
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\":\s*\"?(\w+)")
_NOT_RENEWED = "the credentials can't be renewed, expected those of a session that lasts"
_CUT = "response body error"  # part of the library's message
_MD5 = re.compile(r"[0-9a-f]{32}")
_INVALID = re.compile(r"invalid path: .*?Path \"(.*?)\"", re.DOTALL | re.IGNORECASE)  # of the library's message
# S3's codes for corrupted transfers, which are retried.
_CHANGED = ("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]+)")
_Answer = TypeVar("_Answer")


class NotAllowed(UserError):
    """The store knows the request's sender, or wants to, and does not allow it: 401 or 403."""


class _OtherBytes(EOFError):
    """An answer has other bytes than the object, as far as the store tells."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object: key, size, time of last change (nanoseconds since 1970, whole seconds, by the store's clock), and the
    mark (ETag, version) that the store gives to its current content.
    """

    key: str
    size: int
    changed: int
    version: dict[str, str | None]

    @property
    def content(self) -> str:
        """Identifies the content: the ETag without quotation marks, which differ between listings and single objects;
        without an ETag the time of the last change.
        """
        tag = (self.version.get("e_tag") or "").removeprefix("W/").strip('"')
        return tag or f"changed {self.changed}"


class ObjectClient:
    """One bucket (in Azure: container).

    Every method raises UserError if the store can't be reached within the limit, or refuses the request.

    Args:
        url: its name in errors.
        encrypted: whether its connections are.
        md5_tags: whether an ETag that looks like an MD5 is one.
        service: the endpoint or account whose bucket it is, which its URL does not say; None: the scheme's usual one.
    """

    def __init__(
        self, url: str, store: Any, *, encrypted: bool = True, md5_tags: bool = True, service: str | None = None
    ):
        import obstore

        self.service = service
        self.url, self._encrypted, self._md5_tags = url, encrypted, md5_tags
        self._library, self._store, self._exists = obstore, store, False

    def info(self, key: str) -> ObjectInfo | None:
        """Size, time and mark of an object; None if it does not exist."""
        try:
            return _info(self._asked(key, lambda: self._library.head(self._store, key)))
        except FileNotFoundError:
            if not self._exists:  # the response doesn't show whether the bucket is missing; a listing does
                with suppress(NotAllowed):  # to one who may list a part of the bucket, or nothing
                    self.is_folder("")
                self._exists = True
            return None

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a folder (the whole bucket: an empty name), in the order of their keys.

        Among them are those of size 0, named as a folder, that a store's console makes for the folders in it. None of
        that name is found (`info`), since it ends with a slash, which the library leaves out; where an object has the
        name without it, that one is listed.

        Raises:
            UserError: several objects would be listed by one name.
        """
        listed = self._whole(prefix, lambda: self._each(prefix), lambda listed: [each.key for each in listed])
        found: dict[str, ObjectInfo] = {}
        for each in listed:
            known = found.setdefault(each.key, each)
            if each.size and (known is not each and known.size or each.key == prefix):
                raise UserError(
                    f"{self.url}/{each.key}: found an object with content whose name begins or ends with a slash, "
                    "which can't be read, expected none; rename it"
                )
            if each.size:
                found[each.key] = each
        found.pop(prefix, None)
        yield from (found[key] for key in sorted(found))

    def _each(self, prefix: str) -> list[ObjectInfo]:
        """A listing, as the store gives it.

        Raises:
            UserError: it begins anew, as where something between drops the token of what follows.
        """
        listed: list[ObjectInfo] = []
        times: Counter[str] = Counter()
        chunk: Any
        for chunk in self._library.list(self._store, prefix or None):
            infos = [_info(each) for each in chunk]
            times.update(each.key for each in infos)
            if any(times[each.key] > _MOST_OF_A_NAME for each in infos):
                raise self._listed_again(prefix, len(times))
            listed += infos
        return listed

    def _listed_again(self, prefix: str, count: int) -> UserError:
        return UserError(
            f"{self.url}/{prefix}: found {count:,} objects in a listing and, asked for what follows, some again, "
            "expected none; use a server, or a version of it, that knows ListObjectsV2 with continuation tokens"
        )

    def is_folder(self, prefix: str) -> bool:
        """Whether any object lies below."""

        def ask() -> bool:
            try:
                return len(next(iter(self._library.list(self._store, prefix or None, chunk_size=1)), ())) > 0
            except self._library.exceptions.BaseError as error:
                if _INVALID.search(str(error)):  # one with a name that can't be read
                    return True
                raise

        return self._asked(prefix, ask)

    def names(self, prefix: str) -> list[str]:
        """Names of the objects and of the folders right below a folder."""
        listed = self._listed(prefix)
        keys = [*listed["common_prefixes"], *(each["path"] for each in listed["objects"] if each["path"] != prefix)]
        return sorted(key.rpartition("/")[2] for key in keys)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders right below a folder."""
        return sorted(key.rpartition("/")[2] for key in self._listed(prefix)["common_prefixes"])

    def _listed(self, prefix: str) -> Any:
        return self._whole(
            prefix,
            lambda: self._library.list_with_delimiter(self._store, prefix or None),
            lambda listed: [
                *(each["path"] for each in listed["objects"]),
                *(f"{each}/{_LAST_LETTER}" for each in listed["common_prefixes"]),  # behind all that lies there
            ],
        )

    def _whole(self, prefix: str, ask: Callable[[], _Answer], keys: Callable[[_Answer], list[str]]) -> _Answer:
        """A listing below a folder with all its keys: a server that knows only the first version of listings ignores
        the request for what follows its first answer, and nothing in that tells.
        """
        behind: str | None = None
        for _ in range(2):
            listed = self._asked(prefix, ask)
            last = max(found) if len(found := keys(listed)) >= _FEWEST_OF_A_PAGE else None
            # What lay behind the first listing is in this one: it was written between the two requests.
            if last is None or behind is not None and last >= behind:
                return listed
            behind = self._first_behind(prefix, last, set(found))
            if behind is None:
                return listed
            if behind < last:
                break
        raise self._listed_again(prefix, len(found))

    def _first_behind(self, prefix: str, last: str, found: set[str]) -> str | None:
        """The first of the keys that a store lists behind this one, apart from marks of folders among those that were
        found, whose last slash the library leaves out; one before it, if the store ignores where to begin.
        """

        def is_mark(path: str, size: int) -> bool:
            return not size and path in found and f"{path}/" > last

        def ask() -> str | None:
            chunks: Any = self._library.list(self._store, prefix or None, offset=last)
            listed = (each for chunk in chunks for each in chunk)
            return next((each["path"] for each in listed if not is_mark(each["path"], each["size"])), None)

        return self._asked(prefix, ask)

    def read(
        self, key: str, start: int = 0, stop: int | None = None, *, checked: bool = False, most: int | None = None
    ) -> bytes:
        """Bytes [start, stop) of an object, or all from `start` on.

        Args:
            checked: read twice what can't be compared with an ETag, if the connection isn't encrypted.
            most: bytes of a whole object that is read.

        Raises:
            FileNotFoundError: there is none.
            UserError: it has more than `most` bytes, none of which are then read.
        """
        options = {} if not start and stop is None else {"range": {"offset": start} if stop is None else (start, stop)}

        def answered() -> tuple[bytes, Fields]:
            answer = self._library.get(self._store, key, options=options)
            _check_size(f"{self.url}/{key}", answer.meta["size"], most)
            data = bytes(answer.bytes())
            expected = (answer.meta["size"] if stop is None else min(stop, answer.meta["size"])) - start
            if len(data) != expected:
                raise EOFError(f"the answer ended after {len(data)} of {expected} bytes")
            return data, answer.meta

        def ask() -> bytes:
            data, meta = answered()
            if self._encrypted:
                return data
            tag = (meta["e_tag"] or "").strip('"')
            if self._md5_tags and len(data) == meta["size"] and _MD5.fullmatch(tag):
                if hashlib.md5(data, usedforsecurity=False).hexdigest() != tag:
                    raise _OtherBytes(f"its ETag {tag}")
            elif checked and answered()[0] != data:
                raise _OtherBytes("a second answer")
            return data

        return self._asked(key, ask)

    def write(self, key: str, content: bytes | Path) -> None:
        """Write an object atomically. Always in one request: an interrupted multipart upload leaves data that no
        listing shows.

        Raises:
            OSError: the file can't be read.
        """
        # Not by the library, whose error of a file looks like one of the store.
        data = content.read_bytes() if isinstance(content, Path) else content
        self._asked(key, lambda: self._put(key, data, "overwrite"))

    def write_if(self, key: str, content: bytes, version: Fields | None) -> Fields | None:
        """Write an object only if its version is `version` (None: only if it does not exist).

        Returns:
            Its new version, or None if the condition failed.
        """
        exceptions = self._library.exceptions
        failed = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        mode = "create" if version is None else {name: value for name, value in version.items() if value}
        try:
            return self._asked(key, lambda: self._put(key, content, mode), failed)
        except (*failed, FileNotFoundError):
            return None

    def _put(self, key: str, content: bytes, mode: Any) -> Fields:
        written = self._library.put(self._store, key, content, mode=mode, use_multipart=False)
        return {name: written[name] for name in ("e_tag", "version")}

    def delete(self, keys: list[str]) -> None:
        """Remove objects; missing ones are not an error."""
        if not keys:
            return
        try:
            self._asked(keys[0], lambda: self._library.delete(self._store, keys))
        # gs and az raise it for missing objects, also after a retry whose first response was lost
        except FileNotFoundError:
            for key in keys if len(keys) > 1 else ():
                self.delete([key])  # a missing object must not prevent the removal of others

    def _asked(self, key: str, ask: Callable[[], _Answer], kept: tuple[type[Exception], ...] = ()) -> _Answer:
        """The result of `ask`. The library retries requests; this also retries those whose response was cut off.

        Args:
            kept: what is raised as it is.
        """
        exceptions = self._library.exceptions
        for number in range(_BODY_TRIES):
            try:
                return ask()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    raise UserError(
                        f"{self.url}: found no such bucket, expected an existing one; make it, or look at "
                        "its name, region and endpoint"
                    ) from error
                raise FileNotFoundError(f"{self.url}/{key}") from error
            except kept:
                raise
            except (exceptions.BaseError, EOFError, OSError) as error:
                cut = isinstance(error, EOFError) or any(each in str(error) for each in (_CUT, *_CHANGED))
                if not cut or number == _BODY_TRIES - 1:
                    status = _STATUS.search(str(error))
                    kind = NotAllowed if status and status[1][:3] in ("401", "403") else UserError
                    raise kind(self._message(key, error)) from error
            time.sleep(_FIRST_WAIT * 2**number)
        raise AssertionError("unreachable: the last try returns or raises")

    def _message(self, key: str, error: Exception) -> str:
        """One line about the failure, without the library's dump of the request."""
        text, where = str(error), f"{self.url}/{key}"
        if isinstance(error, _OtherBytes):
            return (
                f"{where}: found other bytes than {error} has, in each of {_BODY_TRIES} answers, expected the same; "
                "look at the network, use an https:// endpoint, or, if ETags of this store are no MD5 of an object's "
                "bytes, set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
            )
        if invalid := _INVALID.search(text):
            return (
                f"{self.url}: found an object named {invalid[1]!r}, expected names without empty parts (//), parts . "
                "and .., and control characters; rename it, or choose a folder without it"
            )
        code = next((found[1] or found[2] for found in [_CODE.search(text)] if found), None)
        status = _STATUS.search(text)
        said = ", ".join(filter(None, [status and status[1].strip(), code]))
        if "NoSuchBucket" in text:
            return f"{self.url}: found no such bucket, expected an existing one; make it, or look at its name"
        if _NOT_RENEWED in text:
            return f"{self.url}: {_NOT_RENEWED}; log in again, then run the same command again"
        if "169.254.169.254" in text or "token request" in text or "MissingAccount" in text:
            return f"{self.url}: {_NO_CREDENTIALS[self.url.partition(':')[0]]}"
        if status and status[1][0] in "34" and status[1][:3] not in ("408", "429"):
            return (
                f"{where}: the store refused the request ({said}), expected it to be allowed; look at the "
                "credentials and their permissions, and at the bucket's region"
            )
        said = said or _reason(text)
        return (
            f"{where}: the store didn't answer as expected ({said}), also not after up to {RETRIES} retries in "
            f"{RETRY_SECONDS:.0f} s{ADVICE}"
        )


ADVICE = "; look at the endpoint and the network, then run the same command again"
"""The end of the message of a store that did not answer; of no use where the request is made again anyway."""

_NO_CREDENTIALS = {
    "s3": "found no credentials, expected some in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in ~/.aws, or as a role "
    "of this machine (of a public bucket none are needed with AWS_SKIP_SIGNATURE=true)",
    "gs": "found no credentials, expected some in GOOGLE_APPLICATION_CREDENTIALS, by `gcloud auth application-default "
    "login`, or as a role of this machine",
    "az": "found no account or credentials, expected AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or "
    "another kind of them in the environment), or a role of this machine",
}


def _reason(text: str) -> str:
    """The reason of a connection error, in the library's words."""
    for part, said in (
        ("kind: Connect", "no connection"),
        ("kind: Timeout", "no answer in time"),
        (_CUT, "the connection was cut"),
    ):
        if part in text:
            return said
    return " ".join(text.partition("Debug source")[0].rpartition(" - ")[2].split())[:120]


def _check_size(where: str, size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise UserError(f"{where}: found {size:,} bytes, expected at most {most:,}; replace it by what it was")


def _info(meta: Fields) -> ObjectInfo:
    changed = int(meta["last_modified"].timestamp()) * 10**9  # listings have fractions of seconds, headers don't
    return ObjectInfo(meta["path"], meta["size"], changed, {name: meta[name] for name in ("e_tag", "version")})


class HubClient:
    """The files of a repository of the Hugging Face hub, read only, with the reading methods of `ObjectClient`."""

    def __init__(self, url: str):
        try:
            from huggingface_hub import HfFileSystem
        except ImportError as error:
            raise UserError(f"{url}: the library is missing; {how_to_install('stores')}") from error
        self.url, self._root = url, url.removeprefix("hf://")
        self._files = HfFileSystem()

    def info(self, key: str) -> ObjectInfo | None:
        """Size and time of a file; None if it does not exist."""
        try:
            described = self._asked(key, lambda: self._files.info(f"{self._root}/{key}", expand_info=True))
        except FileNotFoundError:
            return None
        return self._info(described) if described["type"] == "file" else None

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """All files below a folder, in the order of their names."""
        try:
            found: Any = self._asked(
                prefix, lambda: self._files.find(f"{self._root}/{prefix}".rstrip("/"), detail=True, expand_info=True)
            )
        except FileNotFoundError:
            return
        yield from (self._info(found[name]) for name in sorted(found))

    def is_folder(self, prefix: str) -> bool:
        """Whether any file lies below."""
        return any(each.key != prefix for each in self.objects(prefix))

    def names(self, prefix: str) -> list[str]:
        """Names of the files and of the folders right below a folder."""
        start = f"{prefix}/" if prefix else ""
        return sorted({each.key[len(start) :].partition("/")[0] for each in self.objects(prefix)})

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders right below a folder."""
        parts = [each.key[len(f"{prefix}/" if prefix else "") :].partition("/") for each in self.objects(prefix)]
        return sorted({name for name, slash, _ in parts if slash})

    def read(
        self, key: str, start: int = 0, stop: int | None = None, *, checked: bool = False, most: int | None = None
    ) -> bytes:
        """Bytes [start, stop) of a file, or all from `start` on.

        Args:
            checked: read twice if the connection isn't encrypted.
            most: bytes of a whole file that is read.

        Raises:
            FileNotFoundError: there is none.
            UserError: it has more than `most` bytes, none of which are then read.
        """
        if most is not None:
            described = self._asked(key, lambda: self._files.info(f"{self._root}/{key}"))
            _check_size(f"{self.url}/{key}", described["size"], most)

        def ask() -> bytes:
            data, *again = (
                self._files.cat_file(f"{self._root}/{key}", start=start, end=stop)
                for _ in range(2 if checked and self._files.endpoint.startswith("http://") else 1)
            )
            if again not in ([], [data]):
                raise _OtherBytes
            return data

        return self._asked(key, ask)

    def _info(self, described: Fields) -> ObjectInfo:
        commit = described.get("last_commit")
        changed = 0 if commit is None else int(commit.date.timestamp() * 1e9)
        return ObjectInfo(
            described["name"][len(self._root) + 1 :], described["size"], changed, {"e_tag": described.get("blob_id")}
        )

    def _asked(self, key: str, ask: Callable[[], _Answer]) -> _Answer:
        for number in range(_BODY_TRIES):
            try:
                return ask()
            except FileNotFoundError:
                raise
            except Exception as error:  # network and hub: the library raises many kinds of errors
                refused = getattr(getattr(error, "response", None), "status_code", 500) < 500
                if refused or number == _BODY_TRIES - 1:
                    raise UserError(
                        f"{self.url}/{key}: can't be read ({type(error).__name__}); look at the name, at "
                        "`hf auth login` and the network, then run the same command again"
                    ) from error
            time.sleep(_FIRST_WAIT * 4**number)
        raise AssertionError("unreachable: the last try returns or raises")


@lru_cache(maxsize=64)
def open_client(scheme: str, bucket: str) -> ObjectClient | HubClient:
    """The client of a bucket, one per process.

    Raises:
        UserError: the extra or the credentials are missing.
    """
    url = f"{scheme}://{bucket}"
    if scheme == "hf":
        return HubClient(url)
    try:
        import botocore.session
        from obstore import exceptions, store
    except ImportError as error:
        raise UserError(f"{url}: the library for object stores is missing; {how_to_install('stores')}") from error
    common: Fields = {
        "client_options": {
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "read_timeout": timedelta(seconds=_SILENT_SECONDS),
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {
                "init_backoff": timedelta(seconds=_FIRST_WAIT),
                "max_backoff": timedelta(seconds=_LONGEST_WAIT),
                "base": 2,
            },
        },
    }
    session = botocore.session.get_session()
    try:
        if scheme == "s3":
            return _s3(store.S3Store, bucket, session, common)
        if scheme == "gs":
            base = _setting(session, ["GOOGLE_BASE_URL"])
            http = base is not None and base.startswith("http://")
            common["client_options"]["allow_http"] = http
            return ObjectClient(url, store.GCSStore(bucket, **common), encrypted=not http, service=base)
        emulator = str(_setting(session, ["AZURE_STORAGE_USE_EMULATOR"])).lower() in ("true", "1")
        account = _setting(session, ["AZURE_STORAGE_ACCOUNT_NAME"])
        return ObjectClient(url, store.AzureStore(bucket, **common), encrypted=not emulator, service=account)
    except exceptions.BaseError as error:
        raise UserError(f"{url}: {_NO_CREDENTIALS[scheme]}") from error


def _setting(session: Any, variables: list[str], name: str | None = None) -> str | None:
    """A setting from environment variables, else from the user's ~/.aws."""
    from botocore.configprovider import ConfigChainFactory

    return (
        ConfigChainFactory(session=session)
        .create_config_chain(env_var_names=variables, config_property_names=name)
        .provide()
    )


def _s3(store: Callable[..., Any], bucket: str, session: Any, common: Fields) -> ObjectClient:
    """The client of an S3 bucket with botocore's settings and credentials, as in AWS's tools: environment, then ~/.aws,
    then roles. obstore itself does not read ~/.aws.
    """
    from botocore.exceptions import BotoCoreError

    setting = partial(_setting, session)
    try:
        endpoint = setting(["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"], "endpoint_url")
        region = setting(["AWS_REGION", "AWS_DEFAULT_REGION"], "region")
        checked = setting(["AWS_REQUEST_CHECKSUM_CALCULATION"], "request_checksum_calculation") or "when_supported"
        compared = setting(["AWS_RESPONSE_CHECKSUM_VALIDATION"], "response_checksum_validation") or "when_supported"
        public = str(setting(["AWS_SKIP_SIGNATURE"])).lower() in ("true", "1")
        credentials = None if public else session.get_credentials()
    except BotoCoreError as error:  # a missing profile, an unreadable file
        raise UserError(f"s3://{bucket}: {error}; look at AWS_PROFILE and ~/.aws") from error
    if credentials is None and not public:
        raise UserError(f"s3://{bucket}: {_NO_CREDENTIALS['s3']}")
    encrypted = endpoint is None or not endpoint.startswith("http://")
    options = common["client_options"] | {"allow_http": not encrypted}
    given: Fields = {"region": region or "us-east-1"} | ({} if endpoint is None else {"endpoint": endpoint})
    if checked.lower() != "when_required":  # as in AWS's own tools, for stores that do not support the header
        given["checksum_algorithm"] = "sha256"
    given |= {"skip_signature": True} if public else {"credential_provider": _Credentials(credentials)}
    library_store = store(bucket, client_options=options, retry_config=common["retry_config"], **given)
    tags = compared.lower() != "when_required"
    return ObjectClient(f"s3://{bucket}", library_store, encrypted=encrypted, md5_tags=tags, service=endpoint)


class _Credentials:
    """Adapter of botocore's credentials for obstore; botocore renews expiring ones."""

    def __init__(self, credentials: Any):
        self._credentials = credentials

    def __call__(self) -> Fields:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            frozen = self._credentials.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise RuntimeError(_NOT_RENEWED) from error  # it becomes a part of the library's error
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_CREDENTIAL_SECONDS),
        }

"""20News: is a message about PC or about Macintosh hardware? 1,945 messages, 4,752 tf-idf features.

Rows are the by-date training part, then the test part, each by group and then by file name; a split draws from both.
"""

import hashlib

import numpy as np

from leaveout.builtin.data.examples import Table
from leaveout.builtin.data.files import Remote, download, find, members
from leaveout.errors import InputError

_ARCHIVE = Remote(
    "20news",
    "20news-bydate.tar.gz",
    "https://ndownloader.figshare.com/files/5975967",
    "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
)
_PARTS = ("20news-bydate-train", "20news-bydate-test")
_GROUPS = ("comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware")
# Of the two groups' messages, concatenated: archives with fewer of the other groups work as well.
_SHA256 = "1b425d0cedc89771e13d331af9e3dc9481d99db3d5e1ea89c55cb2d1aa2f67cc"


def _messages() -> dict[tuple[int, int, str], bytes]:
    """Return the raw messages by (part, group, file name), in order."""
    path = find("20news", "20news-bydate*.tar.gz") or download(_ARCHIVE)
    texts = {
        (_PARTS.index(name.parts[-3]), _GROUPS.index(name.parts[-2]), name.name): content
        for name, content in members(path)
        if len(name.parts) >= 3 and name.parts[-3] in _PARTS and name.parts[-2] in _GROUPS
    }
    messages = dict(sorted(texts.items()))
    if hashlib.sha256(b"".join(messages.values())).hexdigest() != _SHA256:
        raise InputError(
            f"{path} does not hold the original messages of {' and '.join(_GROUPS)}: "
            "replace it with the original, or delete it.",
            code="data-changed",
        )
    return messages


def _body(message: bytes) -> str:
    """Return the words the author wrote: headers, footers and quotes give the group away. The order matters."""
    from sklearn.datasets import _twenty_newsgroups as parts

    text = parts.strip_newsgroup_header(message.decode("latin-1"))
    return parts.strip_newsgroup_quoting(parts.strip_newsgroup_footer(text))


def texts() -> tuple[str, ...]:
    """Return the words that the authors wrote, one text per row."""
    return tuple(_body(message) for message in _messages().values())


def table() -> Table:
    """Return tf-idf weights, fitted on the by-date training part; class 1 is the Macintosh group."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    messages = _messages()
    part, group = np.array([key[:2] for key in messages], np.int64).T
    bodies = [_body(message) for message in messages.values()]
    vectoriser = TfidfVectorizer(stop_words="english", min_df=0.001, max_df=0.2)
    vectoriser.fit([body for body, is_test in zip(bodies, part, strict=True) if not is_test])
    return Table(
        x=vectoriser.transform(bodies).toarray(),
        y=group,
        ids=np.arange(len(bodies)),
        n_pool=len(bodies),
        features=tuple(vectoriser.get_feature_names_out()),
        classes=_GROUPS,
        standardise=True,
        raw=[body.strip() for body in bodies],
    )

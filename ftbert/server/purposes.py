"""What texts are for, by any API's words: the prompt that stands before them, and their length."""

from __future__ import annotations

from ftbert.server.description import Description
from ftbert.server.errors import validation
from ftbert.server.inputs import Reading
from ftbert.server.instructions import Instruction, instructed_prompt
from ftbert.server.served_model import ServedModel

# Words for the two kinds of texts in Cohere's, Jina's, Voyage's, NVIDIA's and Google's APIs, and in folders.
_QUERY = ("query", "search_query", "retrieval.query", "retrieval_query")
_DOCUMENT = (
    "document", "passage", "search_document", "corpus", "retrieval.passage", "retrieval.document",
    "retrieval_document", "retrieval_passage",
)  # fmt: skip
# For which models without any prompt have none either.
_OTHER = (
    "classification", "clustering", "separation", "text-matching", "semantic_similarity", "question_answering",
    "fact_verification", "code.query", "code.passage",
)  # fmt: skip


def for_purposes(
    how: Reading, model: ServedModel, purposes: dict[str, str | None], prompt_name: str | None = None,
    instruction: Instruction | None = None,
) -> Reading:  # fmt: skip
    """`how` with the prompt and the length of what texts are for. purposes: by the fields that say so. ApiError 422
    where they differ."""
    about = model.about
    adapters = {adapter for value in purposes.values() if value and (adapter := _adapter_for(value, about))}
    if len(adapters) > 1:
        raise validation(f"{' and '.join(map('`{}`'.format, purposes))} ask for different adapters; give one of them")
    how = how._replace(adapter=adapters.pop()) if adapters else how
    found = {_for_purpose(name, value, about) for name, value in purposes.items() if value is not None}
    if prompt_name is not None:
        found.add((model.prompt(prompt_name), None))
    prompts, lengths = {prompt for prompt, _ in found}, {length for _, length in found if length is not None}
    if len(prompts) > 1 or len(lengths) > 1:
        names = ", ".join(f"`{name}`" for name in ("prompt_name", *purposes))
        raise validation(f"{names} ask for different prompts; give one of them")
    prompt = prompts.pop() if prompts else None
    if instruction is not None:
        prompt = instructed_prompt(about, instruction, prompt)
    if prompt is None:
        return how
    return how._replace(prompt=prompt, most=lengths.pop() if lengths and how.most is None else how.most)


def cut_as(how: Reading, given: bool | str | None, name: str = "truncate") -> Reading:
    """`how` with the truncation that a request names: a bool, NONE, START or END. ApiError 422."""
    if given is None:
        return how
    ways = {"TRUE": (True, how.side), "FALSE": (False, how.side), "NONE": (False, how.side),
            "START": (True, "left"), "END": (True, "right")}  # fmt: skip
    if (way := ways.get(str(given).upper())) is None:
        raise validation(f"`{name}` must be a bool, NONE, START or END; got {str(given)[:20]!r}", param=name)
    return how._replace(truncate=way[0], side=way[1])


def _adapter_for(value: str, about: Description) -> int:
    """As of Job: that of the name, or of the retrieval that a word for queries or documents means."""
    if value in about.adapters:
        return about.adapters.index(value) + 1
    retrieval = next((names for names in (_QUERY, _DOCUMENT) if value.lower() in names), ())
    meant = (name for name in (*retrieval, "retrieval") if retrieval and name in about.adapters)
    return next((about.adapters.index(name) + 1 for name in meant), 0)


def _for_purpose(name: str, value: str, about: Description) -> tuple[str, int | None]:
    """The prompt, and most tokens where the folder says, of texts for `value`: a prompt's own name, or any API's word
    for queries or documents. A folder without a prompt for those has none before them, as in encode_query. ApiError
    422 for other words."""
    purpose = value.lower()
    for words, length in ((_QUERY, about.text.query_length), (_DOCUMENT, about.text.document_length)):
        if purpose in words:
            texts = (about.text.prompts.get(one) for one in (value, *words))
            return next((text for text in texts if text), ""), length
    if value in about.text.prompts or value in about.adapters:
        return about.text.prompts.get(value, about.text.default_prompt), None
    if purpose in _OTHER and not about.adapters and not any(about.text.prompts.values()):
        return "", None
    known = ", ".join(map(repr, dict.fromkeys(("query", "document", *about.text.prompts, *about.adapters))))
    raise validation(f"`{name}` must be one of {known}; got {value[:40]!r}", param=name)

"""What an engine makes of a model that generates: its writer, and what workers must know of it."""

from __future__ import annotations

from ftbert.checkpoint import CAUSAL_LM
from ftbert.decoding import Options, cache_bytes, facts_of_folder, generation_of, requested
from ftbert.model import Model
from ftbert.server.description import Description, GenerationFacts
from ftbert.server.job import Writing
from ftbert.server.logs import LOG
from ftbert.server.metrics import Row
from ftbert.server.settings import Settings
from ftbert.server.writer import Writer
from ftbert.text import ChatTemplate

# Positions of a slot where nobody says: a cache of all that models of today read would not fit beside them.
_POSITIONS = 4096


def writing_of(model: Model, about: Description, settings: Settings, row: Row) -> tuple[Writer, GenerationFacts] | None:
    """None where the model generates nothing, or shall not. ValueError for more positions than the model has."""
    tasks = [head.task for head in model.checkpoint.config.heads]
    if not settings.generation_slots or CAUSAL_LM not in tasks or about.task != "embedding":
        return None
    context, most = model.config.max_seq, settings.max_model_len
    if most is not None and most > context:
        raise ValueError(f"max-model-len: {about.source} reads at most {context} tokens; got {most}")
    slots, positions = settings.generation_slots, most or min(context, _POSITIONS)
    megabytes = cache_bytes(model, slots, positions) / 1e6
    try:
        generation = generation_of(model, slots=slots, positions=positions)
    except (ValueError, RuntimeError) as error:
        if "memory" in str(error):
            raise RuntimeError(
                f"no memory for keys and values of {slots} texts of {positions} tokens, {megabytes:.0f} MB: lower "
                "generation-slots or max-model-len"
            ) from error
        LOG.info("%s generates no text: %s", about.name, error)
        return None
    LOG.info(
        "%s writes %d texts of up to %d tokens at a time (%.0f MB of keys and values)",
        about.name, slots, positions, megabytes,
    )  # fmt: skip

    def request(ids: list[int], writing: Writing) -> object:
        fields = {name: getattr(writing, name) for name in writing.__struct_fields__ if name != "logprobs"}
        return requested(model, ids, Options.of(**fields), positions=positions, logprobs=writing.logprobs)

    return Writer(generation, request, slots, row), _facts(model, about.name, slots, positions)


def _facts(model: Model, name: str, slots: int, positions: int) -> GenerationFacts:
    said = facts_of_folder(model)
    template, special, stop = said.template, dict(said.special), list(said.stop)
    if template is not None:
        try:
            ChatTemplate(template, said.names)
        except ValueError as error:
            LOG.warning("%s answers no chats: %s", name, error)
            template = None
    return GenerationFacts(slots, positions, said.bounded, template, dict(said.names), special, stop)

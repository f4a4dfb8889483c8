"""What an engine makes of a model that generates: its writer, and what workers must know of it."""

from __future__ import annotations

from ftbert.checkpoint import CAUSAL_LM
from ftbert.decoding import Options, facts_of_folder, generation_of, requested
from ftbert.model import Model
from ftbert.server.description import Description, GenerationFacts
from ftbert.server.job import Writing
from ftbert.server.logs import LOG
from ftbert.server.metrics import Row
from ftbert.server.settings import Settings
from ftbert.server.writer import Writer

# Positions of a slot where nobody says: a cache of all that models of today read would not fit beside them.
_POSITIONS = 4096
# Where requests do not say otherwise, of a folder whose task is another.
_GENERATES = ("embedding",)


def writing_of(model: Model, about: Description, settings: Settings, row: Row) -> tuple[Writer, GenerationFacts] | None:
    """None where the model generates nothing, or shall not. ValueError for more positions than the model has."""
    tasks = [head.task for head in model.checkpoint.config.heads]
    if not settings.generation_slots or CAUSAL_LM not in tasks or about.task not in _GENERATES:
        return None
    context, most = model.config.max_seq, settings.max_model_len
    if most is not None and most > context:
        raise ValueError(f"max-model-len: {about.source} reads at most {context} tokens; got {most}")
    slots, positions = settings.generation_slots, most or min(context, _POSITIONS)
    try:
        generation = generation_of(model, slots=slots, positions=positions)
    except ValueError as error:
        LOG.info("%s generates no text: %s", about.name, error)
        return None

    def request(ids: list[int], writing: Writing) -> object:
        fields = {name: getattr(writing, name) for name in writing.__struct_fields__ if name != "logprobs"}
        return requested(model, ids, Options.of(**fields), positions=positions, logprobs=writing.logprobs)

    return Writer(generation, request, slots, row), _facts(model, slots, positions)


def _facts(model: Model, slots: int, positions: int) -> GenerationFacts:
    said = facts_of_folder(model)
    special, stop = dict(said.special), list(said.stop)
    return GenerationFacts(slots, positions, said.bounded, said.template, dict(said.names), special, stop)

"""load and Model: what a user holds."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftbert.building import build
from ftbert.caller import warn_caller
from ftbert.checkpoint import Checkpoint, CheckpointConfig, ModelConfig, told_products
from ftbert.converters import build_reference, cut_texts, open_checkpoint
from ftbert.decoding import LanguageModel
from ftbert.devices import check_devices, check_dtype, check_range, stream_dtype, told_speed
from ftbert.dtypes import DTYPES, EIGHT_BITS, MATRIX_DTYPES, Dtype, parse_dtype, users_word
from ftbert.forked import note_fork
from ftbert.heads import Head, HeadedModule, load_head
from ftbert.keywords import keywords
from ftbert.live_check import check_loaded
from ftbert.load_arguments import ANSWERS, SAME, asked_dtype, checked_source
from ftbert.loaded_types import has_own_dtype
from ftbert.module import EncoderModule
from ftbert.outputs import output
from ftbert.parallel import agreed, find_ranks, told_checkpoint, told_sums
from ftbert.replicas import Replicated, replicate, where_the_ids_are
from ftbert.task_models import TaskModels
from ftbert.text import TextModel
from ftbert.tuning import gemm_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

_READING = threading.Lock()  # heads on demand; one for all models, since none of them could be pickled with its own


@keywords(SAME, ANSWERS)
def load(
    source: str | Path | torch.nn.Module | Checkpoint,
    device: str | torch.device | Sequence[str | torch.device] = "cpu",
    dtype: str | torch.dtype | None = None,
    *,
    parallel: str | None = None,
    attention: str = "auto",
    heads: bool = True,
    filename: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    task: str | None = None,
    verify: bool = True,
    prompts: Mapping[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_length: int | None = None,
    truncate_dim: int | None = None,
    similarity_fn_name: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Model:
    """A model ready to compute.

    source: a folder of ftbert, HuggingFace or GLiNER, an .onnx or .gguf file, a hub id, a live model. device: "cpu",
    "cuda", "cuda:1"; several GPUs, as a list or "cuda:*" for all, have a replica each and share the batches of texts
    (docs/several_gpus.md). parallel: one model instead, over these devices or over the processes of torch.distributed's
    default group, each on its own device, which all make the same calls. "tensor": each has a share of every layer.
    "pipeline": each has some of the layers, and the first the embeddings and the heads; ids and results lie there.
    Large calls go through in parts of whole sequences; one that has its mask or cu_seqlens on a GPU then waits for
    them. `generate` refuses several processes so. dtype: fp32, fp16 (GPU only), bf16 and q8_0 (GPUs from compute
    capability 8.0 on, CPUs), fp8 (from 8.9 on), int8 (from 8.0 on, CPUs with VNNI or AMX, or AVX2 and no AVX-512); on
    the CPU bf16 is that of the matrix products' operands, with float sums: all else and the results are float32. None:
    "auto" for folders that were quantized or converted to a dtype and for quantised decoders, else fp32. "auto": as the
    weights are stored, q8_0 for a decoder whose GGUF file has most of them quantised; on the CPU fp32, or for bf16 the
    faster of the two, which is timed once in a process. fp8, int8 and q8_0 are for the matrices of the layers, all else
    and the results are fp16 or bf16 on a GPU, float32 on the CPU. fp8 and int8 are quantized when the model is first
    loaded so, and kept in the user's cache; those of a live model each time. q8_0 is llama.cpp's Q8_0, made at each
    load; the head that `generate` reads is in it too. Of a folder that `ftbert quantize` wrote fp16 and bf16 are the
    type of all else beside fp8, on a GPU beside int8 too; of an .onnx file that onnxruntime has quantized int8 and
    "auto" are its own integers. attention: "auto", or "fused" / "general" to force a path. heads: the checkpoint's task
    heads too; a masked language model, as which an encoder's ...ForCausalLM or ...LMHeadModel without is_decoder
    counts, then computes its logits in every call. A decoder's ...ForCausalLM gives hidden states, and its head is read
    when `predict`, `rerank`, `generate` or `head` asks for it. What else stands outside the encoder is left out, with a
    warning. filename: of a .gguf file in the folder or the hub's repository, or a pattern of it ("*q8_0.gguf");
    "org/repo/file.gguf" and "org/repo:Q8_0" name one, too. revision, token: of a hub id; a branch, tag or commit, and
    what a private model asks for (None: HF_TOKEN, or that of `hf auth login`). task: of a model with an adapter for
    each, the one that is merged where a call names none. verify: False does not compare weights with the checksums that
    ftbert wrote.

    prompts, default_prompt_name, max_length, truncate_dim, similarity_fn_name: over the folder's, as
    SentenceTransformer and CrossEncoder take them; prompts are added to the folder's. model_kwargs: theirs for
    from_pretrained, of which dtype counts and attn_implementation changes nothing. Their other arguments are answered
    by a TypeError, unless None or False.

    Raises FileNotFoundError, PermissionError, ImportError (an .onnx file without the package onnx, a .gguf file that
    needs the package gguf), ValueError (weights or config do not fit, all problems listed; damaged weights; a dtype
    that the device cannot serve; a model that loses too much in it), RuntimeError (a device that this build or machine
    does not have; a live model that computes something else than its config says), TypeError for what is no
    such source.
    """
    places = check_devices(device, several_cpus=parallel is not None)
    ranks = find_ranks(parallel, places)

    def opened() -> tuple[Any, Checkpoint]:
        named = asked_dtype(dtype, model_kwargs)
        if named not in (None, "auto"):
            named = parse_dtype(named)
            for place in places:
                check_dtype(place, named)
        found = checked_source(source)
        hub = {"revision": revision, "token": token}
        return named, open_checkpoint(found, filename=filename, verify=verify, task=task, **hub)

    named, checkpoint = agreed(
        ranks, places[0], opened,
        lambda made: told_checkpoint(made[1], ranks, places[0], dtype=made[0], attention=attention, heads=heads),
    )  # fmt: skip
    if heads and checkpoint.config.left_out:
        warn_caller(f"{checkpoint.source.where}: {checkpoint.config.left_out}")
    if cut := cut_texts(checkpoint.config.huggingface, checkpoint.config.encoder):
        warn_caller(f"{checkpoint.source.where}: {cut}")
    asked = torch.float32 if named is None and not has_own_dtype(checkpoint) else named
    asked = None if asked in (None, "auto") else asked
    live = source if isinstance(source, torch.nn.Module) else None
    together = places if ranks.size > 1 else places[:1]
    digests: dict[str, str] | None = {} if ranks.group else None
    model = agreed(
        ranks, places[0],
        lambda: Model(*build(checkpoint, together, asked, attention, heads, live, ranks, verify, digests)),
        lambda _: {f"the weights of {name}": digest for name, digest in (digests or {}).items()},
    )  # fmt: skip
    if live is not None:
        check_loaded(model, live)
    model.take_settings(
        prompts, default_prompt_name=default_prompt_name, max_seq_length=max_length, truncate_dim=truncate_dim,
        similarity_fn_name=similarity_fn_name,
    )  # fmt: skip
    return replicate(model, places[len(together) :])


class Model(Replicated, TaskModels, TextModel, LanguageModel):
    """A loaded encoder with the heads of its checkpoint. Calls are thread-safe.

    module: the scriptable torch module. config: the encoder's numbers, which say what is in 8 bits where `checkpoint`,
    the user's, may be plain. folder: where the tokenizer's files are, or None for a live model.
    """

    def __init__(
        self, encoder: Any, checkpoint: Checkpoint, heads: Sequence[Head] = (), stored: CheckpointConfig | None = None
    ) -> None:
        self.module = HeadedModule(encoder, list(heads)) if heads else EncoderModule(encoder)
        self.checkpoint = checkpoint
        self._stored = stored or checkpoint.config
        self.config: ModelConfig = self._stored.encoder
        self.folder = checkpoint.folder
        self._more_heads: dict[str, Head] = {}  # read on demand

    def __repr__(self) -> str:
        c = self.config
        heads = f", heads {self.tasks}" if self.heads else ""
        return (
            f"<ftbert.Model {self.checkpoint.config.architecture}: {c.depth} layers of {c.hidden}, {self.dtype} on "
            f"{', '.join(map(str, self.devices))}{heads}>"
        )

    @property
    def encoder(self) -> Any:
        return self.module.encoder

    @property
    def device(self) -> torch.device:
        return self.encoder.device()  # type: ignore[no-any-return]

    @property
    def dtype(self) -> Dtype:
        """As matrices are stored, the narrowest where they differ; on a GPU the type of all else too, unless that is
        one of 8 bits; on the CPU results are float32. "q8_0", which torch has no type of, is a word."""
        return MATRIX_DTYPES[self.encoder.matrix_dtype()]

    @where_the_ids_are
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        output_last_hidden_state: bool = True,
        output_hidden_states: bool = False,
    ) -> BaseModelOutputWithPooling | Any:
        """input_ids, attention_mask, token_type_ids: int [batch, seq]; the mask any of 0 and 1 (None: all ones).

        Returns last_hidden_state [batch, seq, hidden] in the model's dtype (on the CPU float32), exactly 0 at padding,
        and pooler_output [batch, hidden] (of the first kept token) or None. With a head it is transformers' output of
        that task, with `logits` (0 at padding; question answering: also start_logits and end_logits) beside these;
        multiple choice takes [batch, choices, seq]. RuntimeError says what does not fit, TypeError what is no tensor.
        On a GPU the ids are looked at where the call waits for the GPU anyway, that is with a mask there; else one
        outside the vocabulary makes its sequence NaN.

        output_last_hidden_state: False leaves it None. Where the pooler and the heads read the first token only, the
        last layer is then computed for that token alone. output_hidden_states: hidden_states is then transformers'
        tuple, the embedding's output and every layer's, layers+1 tensors of the shape of last_hidden_state.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        note_fork()
        inputs = (input_ids, attention_mask, token_type_ids)
        for name, given in zip(("input_ids", "attention_mask", "token_type_ids"), inputs, strict=True):
            if not isinstance(given, Tensor) and (given is not None or name == "input_ids"):
                raise TypeError(f"{name}: expected a torch tensor [batch, seq], got {type(given).__name__}")
            if given is not None and given.is_meta:
                raise RuntimeError(f"{name}: expected a tensor with data, on {self.device}, got one on meta")
        hidden: Any = None
        pooled: Any
        states: Any = None
        if isinstance(self.module, HeadedModule):
            if output_hidden_states:
                hidden, pooled, logits, more = self.module.run_with(*inputs, ["hidden_states"])
                states = more[0].unbind(0)
            elif output_last_hidden_state or self.module.reads_tokens:
                hidden, pooled, logits = self.module.run(*inputs)
            else:
                pooled, logits = self.module.run_first(*inputs)
            shown = hidden if output_last_hidden_state else None
            return output(self.tasks, shown, pooled if self.config.pooler else None, logits, states)
        if output_hidden_states:
            made, pooled, last = self.module.forward_batch(*inputs, None, 0, ["hidden_states", "pooled", "tokens"])
            states = made.unbind(0)
            hidden = last if output_last_hidden_state else None
        elif output_last_hidden_state:
            hidden, pooled = self.module(*inputs)
        else:
            pooled = self.module.forward_batch(*inputs, None, 0, ["pooled"])[0]
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden, pooler_output=pooled if self.config.pooler else None, hidden_states=states
        )

    @property
    def tasks(self) -> list[str]:
        """What the heads that a call computes are for, empty without one."""
        return [head.task for head in self.heads]

    @property
    def heads(self) -> list[Head]:
        return list(self.module.heads) if isinstance(self.module, HeadedModule) else []  # type: ignore[arg-type]

    def head(self, task: str) -> Head:
        """The checkpoint's head for `task`, also one that no call computes: of a model that was loaded without heads,
        or "causal_lm", a decoder's over its vocabulary. It is read when it is first asked for, and kept. ValueError
        where there is none."""
        known = {head.task: head for head in self.heads} | self._more_heads
        if task in known:
            return known[task]
        config = next((one for one in self.checkpoint.config.heads if one.task == task), None)
        if config is None:
            found = ", ".join(one.task for one in self.checkpoint.config.heads) or "none"
            raise ValueError(f"this model has no head for {task}; its heads: {found}")
        with _READING:
            if task not in self._more_heads:
                element = DTYPES[self.encoder.dtype()]
                self._more_heads[task] = load_head(self.checkpoint, config, self.device, element)
        return self._more_heads[task]

    @where_the_ids_are
    def masked_lm_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        positions: Tensor,
    ) -> Tensor:
        """Logits at some tokens only, without computing the vocabulary for the others.

        positions: bool [batch, seq], usually input_ids == mask_token_id; valid tokens only. Returns [count, vocab], row
        by row. ValueError when the model has no such head.
        """
        if not isinstance(self.module, HeadedModule) or self.tasks[0] != "masked_lm":
            raise ValueError(f"this model has no masked language model head; its heads: {self.tasks or 'none'}")
        if not isinstance(positions, Tensor):
            raise TypeError(f"positions: expected a torch tensor [batch, seq], got {type(positions).__name__}")
        return self.module.logits_at(positions, input_ids, attention_mask, token_type_ids)

    @where_the_ids_are
    def forward_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Tensor | None = None,
        *,
        want: str = "tokens",
        rows: Tensor | None = None,
        shared_prefix: int = 0,
        keys: Tensor | None = None,
    ) -> Tensor:
        """input_ids int [tokens], cu_seqlens int32 [batch+1], both on the model's device -> [tokens, hidden].

        max_seqlen: at least the longest sequence. want: "first" or "last", each sequence's first or last token alone,
        [batch, hidden] (0 for an empty one), or "rows", the tokens `rows` int [n] alone, [n, hidden]: the last
        layer is computed for them alone; "pooled", the first one's pooled output; "hidden_states", every
        layer's, [layers+1, tokens, hidden]. shared_prefix: the number of tokens of the first sequence, where
        all others begin with those and are given without them; max_seqlen is of the longest with them. For
        models whose tokens see none that follow, by the fused attention path; else RuntimeError. keys: int32
        [batch], how many tokens of each sequence are attended to, the first; those behind attend and are not
        attended to. No host synchronisation; on CUDA the contents of the arguments are therefore not looked at,
        and an id outside the vocabulary, or a row that is none, gives a row of NaN.
        """
        note_fork()
        return self.module.forward_packed(
            input_ids, cu_seqlens, max_seqlen, token_type_ids, want, rows, shared_prefix, keys
        )

    @where_the_ids_are
    def logits_packed(
        self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int, token_type_ids: Tensor | None = None
    ) -> list[Tensor]:
        """Arguments as of forward_packed -> the logits of every head, in the order of `tasks`: [tokens, outputs] for
        heads over tokens, else [batch, outputs] (multiple choice: [batch, 1]). ValueError when the model has no head.
        """
        note_fork()
        if not isinstance(self.module, HeadedModule):
            raise ValueError("this model has no head: load a checkpoint with one, with heads=True")
        return self.module.logits_packed(input_ids, cu_seqlens, max_seqlen, token_type_ids)

    @keywords(answers={"non_blocking": lambda model, value: None})
    def to(
        self,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> Model:
        """The same model on another device, or on several, or in another dtype; this one stays as it is.

        Weights that were rounded are read again from the checkpoint where there is one; of a live model they stay
        rounded, with a warning, and fp8, int8 and q8_0 are refused: `load` makes them of the module.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"the first argument is a device; for a dtype write to(dtype={device})")
        places = self.devices if device is None else check_devices(device)
        element = self.dtype if dtype is None else parse_dtype(dtype)
        if not self.encoder.whole():
            raise RuntimeError("this model lies on several devices as one; load it anew to have it elsewhere")
        for place in places:
            check_dtype(place, element)
        if element != self.dtype and (self.dtype != torch.float32 or element in EIGHT_BITS.values()):
            if self.folder is not None:
                asked = self.info()
                path = asked["attention"] if asked["attention_reason"] == "asked for" else "auto"
                made = Model(*build(self.checkpoint, places[:1], element, path, bool(self.heads)))
                made.text_choices = self.text_choices
                return replicate(made, places[1:])
            if bits := {element, self.dtype} & {*EIGHT_BITS.values()}:
                word = users_word(bits.pop())
                raise ValueError(f"weights of a live model do not become {word}, or cease to be, here: load it again")
            warn_caller(f"this model's weights were rounded to {self.dtype} and stay so")
        check_range(self.config.outgrows_fp16, element)
        return replicate(self.copy_to(places[0], element), places[1:])

    def copy_to(self, place: torch.device, element: Dtype | None = None) -> Model:
        """This replica's weights at `place`, in `element` (None: as they are), from device to device."""
        element = self.dtype if element is None else element
        if isinstance(element, str) or element in EIGHT_BITS.values():
            element = DTYPES[self.encoder.dtype()]  # of all but those in 8 bits
        names = {value: name for name, value in DTYPES.items()}
        gemm_table.install(place)
        heads = [copy.deepcopy(head).to(place, stream_dtype(place, element)) for head in self.heads]
        made = Model(self.encoder.to(place, names[element]), self.checkpoint, heads, self._stored)
        made.text_choices = self.text_choices
        return made

    def use_cuda_graphs(self, on: bool = True) -> None:
        """Whether small calls on a GPU (up to 8192 tokens) are recorded once for their size and then repeated as one
        launch. On unless $FTBERT_CUDA_GRAPHS is "off"; nothing on the CPU. Results agree to rounding: a recording
        may run another attention kernel, chosen for the longest length that it serves."""
        for replica in self.replicas:
            replica.encoder.use_cuda_graphs(on)

    def info(self) -> dict[str, str]:
        """Device, dtype and which kernels were chosen and why; of several replicas where each lies, of several ranks
        what a sum over them takes."""
        later = [f"{head.task} (on demand)" for head in self.checkpoint.config.heads if head.on_demand]
        entities = ["entities by labels"] if self.checkpoint.entities is not None else []
        heads = ", ".join([*self.tasks, *later, *entities]) or "none"
        return {
            "architecture": self.checkpoint.config.architecture,
            "heads": heads,
            **dict(self.encoder.info()),
            **self.checkpoint.told(),
            **told_products(self._stored),
            **told_speed(self.device),
            **self.told_replicas(),
            **told_sums(self.encoder),
        }

    def reference(self) -> PreTrainedModel:
        """The equivalent transformers model, with the heads that a call computes: float32, eval, on the CPU, without
        dropout."""
        return build_reference(self.checkpoint, with_heads=bool(self.heads))

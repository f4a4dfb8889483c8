"""What people may try, and why it does not run: the reason for each model type of transformers that reads text."""

from __future__ import annotations

_DECODER = "it is a decoder: each token attends to those before it alone"
_LLAMA = "no table is there yet: it is a decoder with rotary positions, RMSNorm and gated feed-forward layers"
_IMAGES = "it reads images"
_ROTARY = "no table is there yet: its positions are rotary, and its feed-forward layers gated"
_BOXES = "its embeddings take the place of each word on a page"
_SEQ2SEQ = "it is an encoder with a decoder, of which ftbert runs neither"
_APPROXIMATE = "its attention is an approximation of the full one"
_LANGUAGES = "its embeddings add languages, and its mask multiplies each layer's result"
_SPEECH = "it reads sound, with convolutions between its layers"

_BY_REASON: dict[str, tuple[str, ...]] = {
    _DECODER: (
        "apertus", "arcee", "biogpt", "bloom", "deepseek_v3", "diffllama", "emu3", "exaone4",
        "falcon", "glm", "glm4", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "helium", "llama4",
        "minimax", "mistral4", "mixtral", "mllama", "mpt", "nemotron", "opt", "persimmon", "phi",
        "qwen2_moe", "qwen3_5", "qwen3_moe", "qwen3_next", "seed_oss", "stablelm", "starcoder2",
    ),
    _LLAMA: ("ministral3",),
    _IMAGES: ("clip_vision_model", "siglip_vision_model", "siglip2_vision_model"),
    _ROTARY: ("gte", "ultrabert"),
    _BOXES: ("layoutlm", "layoutlmv2", "layoutlmv3"),
    _SEQ2SEQ: ("bart", "mbart", "mvp"),
    _APPROXIMATE: ("mra", "nystromformer", "yoso"),
    _LANGUAGES: ("flaubert", "xlm"),
    _SPEECH: (
        "lasr_ctc", "lasr_encoder", "parakeet_ctc", "parakeet_encoder", "seamless_m4t", "wav2vec2-bert",
        "wav2vec2-conformer",
    ),
}  # fmt: skip

REFUSED: dict[str, str] = {
    **{kind: reason for reason, kinds in _BY_REASON.items() for kind in kinds},
    "bert-generation": "no table is there yet: its layers are BERT's, its embeddings have no token types",
    "big_bird": "its attention is sparse by blocks",
    "bros": "its attention scores depend on the places of words on a page",
    "canine": "it hashes characters, and shortens the sequence by a convolution",
    "convbert": "half of its attention is a convolution",
    "embedding_gemma2": "its positions are rotary, and its layers take embeddings of their own",
    "esmc": "its positions are rotary, its feed-forward layers gated, its queries and keys normed",
    "fnet": "a Fourier transform stands in place of attention",
    "funnel": "it shortens the sequence from block to block",
    "gemma3": "it reads images beside text; its text part alone is gemma3_text, which runs",
    "ibert": "it computes in integers with scales of its own",
    "lilt": "a second stream of layers reads the places of words on a page",
    "longformer": "its attention is a sliding window with global tokens",
    "luke": "its entities have embeddings and queries of their own",
    "markuplm": "its embeddings take the path of each node of a page",
    "mobilebert": "its layers are bottlenecks with several feed-forward blocks, and norms without statistics",
    "modernvbert": "it reads images beside text, through ModernBERT's layers",
    "neomme": "its positions are rotary in two dimensions, its attention's result gated",
    "nomic-bert-moe": "its feed-forward layers choose among experts",
    "openai_privacy_filter": "its feed-forward layers choose among experts, and its attention has sinks",
    "patchtst": "it reads time series",
    "perceiver": "its attention goes through latent vectors",
    "reformer": "its attention is chosen by hashes",
    "roc_bert": "its embeddings add the shape and the pronunciation of each character",
    "sam3_lite_text_text_model": "some of its layers are convolutions",
    "splinter": "no table is there yet: its layers are BERT's, its head selects spans by question tokens",
    "tipsv2_text_model": "its positions are sinusoids",
    "squeezebert": "grouped convolutions stand in place of its products",
    "t5gemma": "it is an encoder with a decoder, and no table is there yet for its encoder",
    "t5gemma2": "it is an encoder with a decoder, and no table is there yet for its encoder",
    "tapas": "its token types are seven, for the rows and columns of a table",
    "xlnet": "its attention scores depend on relative positions, and a permutation of the tokens",
    "xmod": "its layers hold an adapter for each language, chosen by lang_ids",
}

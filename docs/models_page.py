"""Makes the page on the models of the fsdp2 backend: `python docs/models_page.py > docs/models.md`.

It comes from the tables in `millrace/fsdp2/architectures.py`.
"""

from millrace.fsdp2.architectures import ATTENTIONS, BY_REASON, RIGHT, RIGHT_WITH, UNTRIED

HEADING = """# Models on FSDP2

This page is made by `python docs/models_page.py > docs/models.md` from `millrace/fsdp2/architectures.py`: edit that,
not this page.

The FSDP2 backend trains what the `transformers` library has, if a packed micro-batch gives every sequence what it
gets alone. This is not assumed: before a model is loaded, and by `millrace validate`, a tiny model of its config is
computed in both ways on the CPU in float32. It keeps the kinds of layers, rotary positions, windows, caps, sinks and
biases of the config, and has few layers, heads and experts with random weights. Short and long sequences lie beside
each other. A model is accepted if all log-probabilities are within 0.0001 nats of those of each sequence alone with
transformers' eager attention, and its gradients within 0.1 %. A model that makes more of rounding than others (Gemma
3n) may differ by as much as weights that change in their last bit make it, and by 0.001 at most. The message of a
refusal has the measured difference, and what the attention leaves out.

`segments` and `varlen` stand for each other, as they take the same. For `flash_attention_2` a slow reference of what
flash-attn 2 honours is computed.

Refused are also rotary positions of which engine and trainer have different rules of length: `dynamic`, except
Hunyuan's with `alpha`; `longrope` (Phi-3.5, Phi-4-mini), unless the longest text of the job, `data.max_prompt_tokens`
and `rollout.max_response_tokens` together, has at most `original_max_position_embeddings` tokens.

The tables have every causal language model of transformers by its `model_type`, with the default entries of its
config; other entries may decide otherwise. Each accepted one was also compared with the transformers engine, which
decodes with a cache: log-probabilities of tokens that follow prompts of several lengths are within 0.0001 nats.

With vLLM 0.32 on the CPU, in float32, `cohere`, `gemma3_text`, `glm4`, `granite`, `llama` and `mistral` were compared
in the same way: within 0.00002 nats. `cohere2` was not equal: vLLM's windows have one token more than transformers',
which changes the log-probabilities of texts that are longer than `sliding_window`."""


def page() -> str:
    """The page."""
    every = ", ".join(f"`{name}`" for name in ATTENTIONS)
    parts = [HEADING, "## Accepted", f"With each attention ({every}):", _names(RIGHT), "With some:"]
    rows = [f"| `{name}` | {_names(found)} |" for name, found in sorted(RIGHT_WITH.items())]
    parts.append("\n".join(["| model type | `trainer.backend_options.attention` |", "|---|---|", *rows]))
    parts.append("## Refused")
    refused = [f"| {reason} | {_names(sorted(names.split()))} |" for reason, names in BY_REASON.items()]
    parts.append("\n".join(["| reason | model types |", "|---|---|", *refused]))
    parts += ["## Not tried", "No small model can be made of the defaults of these. The config of a job is tried:"]
    return "\n\n".join([*parts, _names(UNTRIED)]) + "\n"


def _names(names: object) -> str:
    assert isinstance(names, tuple | list | frozenset)
    ordered = names if isinstance(names, tuple) else sorted(names)
    return ", ".join(f"`{name}`" for name in ordered)


if __name__ == "__main__":
    print(page(), end="")

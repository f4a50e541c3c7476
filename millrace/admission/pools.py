"""Whether the model of a pool can do what the job uses the pool for, as far as its folder shows."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.data.model_folder import (
    OTHER_HEADS,
    TOKENIZER_FILES,
    check_regular,
    check_weights_folder,
    context,
    has_chat_template,
    text_config,
    vocabulary,
)
from millrace.engines import ENGINES
from millrace.errors import InvalidJob, Mistake, refused, wrong_value
from millrace.rewards import judge_template as template
from millrace.spec.model import Model
from millrace.spec.pool import JudgeTerm, Pool, PoolTask

REWARD_MODELS = "ForSequenceClassification"
"""Ending of the names of architectures that give a text one number, or one for each label."""


def check_pool(policy: str, pool: Pool, task: PoolTask, field: str, *, longest: int = 0, weights: bool = True) -> None:
    """Raises InvalidJob about `field`, which has the folder of the pool's model. `policy`: folder of the model that is
    trained; `longest`: tokens of its longest text. Without `weights` those are not looked for."""
    folder = check_weights_folder(pool.path, field=field, weights=weights)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        fix = "save the tokenizer into the same folder (tokenizer.save_pretrained)."
        raise refused(field, pool.path, f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)}", fix)
    config = text_config(folder, field)
    architecture = next(iter(config.get("architectures") or []), "")
    if task is PoolTask.REWARDS:
        _check_reward_model(pool.path, architecture, config.get("id2label"), field)
    elif architecture.endswith(OTHER_HEADS):
        fix = "give a language model, for example a Qwen3ForCausalLM."
        raise refused(field, pool.path, f"{architecture} cannot give {task}", fix)
    elif task is PoolTask.LOGPROBS:
        _check_vocabulary(policy, folder, field)
        if not _changes_positions(pool) and (most := context(folder)) is not None and most < longest:
            reason = f"has positions up to {most}, and prompt and response together may have {longest} tokens"
            fix = "give a model with a longer context, or lower rollout.max_response_tokens or data.max_prompt_tokens."
            raise refused(field, pool.path, reason, fix)
    elif not has_chat_template(folder):
        raise _no_chat_template(pool, field)


def pool_tokenizer(policy: Model, pool: Pool, task: PoolTask, field: str) -> Any:
    """The tokenizer of the pool's model. Raises InvalidJob if it cannot be loaded, for a teacher that does not have the
    policy's tokens, and for a judge without a chat template."""
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(pool.path, trust_remote_code=pool.trust_remote_code)
        if task is PoolTask.REPLIES and not own.chat_template:
            raise _no_chat_template(pool, field)
        if task is not PoolTask.LOGPROBS:
            return own
        theirs = AutoTokenizer.from_pretrained(policy.path, trust_remote_code=policy.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"the tokenizer of {pool.path} or of the policy cannot be loaded: {str(error)[:300]}"
        raise InvalidJob.of([Mistake(field, what, "save it in the model folder.")]) from error
    known = own.get_vocab()
    if other := sorted(text for text, token in theirs.get_vocab().items() if known.get(text) != token):
        reason = f"its tokenizer has other ids than the policy's for {len(other)} tokens, {json.dumps(other[:3])} first"
        raise refused(field, pool.path, reason, "give a model with the policy's tokenizer.")
    return own


def _no_chat_template(pool: Pool, field: str) -> InvalidJob:
    fix = "give a model that is trained for chats, or save its template in the folder."
    return refused(field, pool.path, "has no chat template, without which a judge cannot be asked", fix)


def _changes_positions(pool: Pool) -> bool:
    """Whether the pool's engine options change the positions that config.json gives."""
    return any(not engine.position_options.isdisjoint(pool.engine_options) for engine in ENGINES.values())


def _check_reward_model(path: str, architecture: str, labels: object, field: str) -> None:
    if not architecture.endswith(REWARD_MODELS):
        reason = f"{architecture or 'config.json names no architecture, which'} is no reward model"
        fix = f"give a model whose architecture ends in {REWARD_MODELS}."
        raise refused(field, path, reason, fix)
    if isinstance(labels, dict) and len(labels) != 1:
        fix = "give a model with one label, whose number is the reward."
        raise refused(field, path, f"its head has {len(labels)} labels", fix)


def _check_vocabulary(policy: str, folder: Path, field: str) -> None:
    """The teacher knows every token that the policy may sample. Raises InvalidJob."""
    own, given = vocabulary(Path(policy)), vocabulary(folder)
    if own is not None and given is not None and given < own - PADDING:
        reason = f"has a vocabulary of {given} tokens, the policy's has {own}"
        raise refused(field, str(folder), reason, "give a model with the policy's tokenizer.")


PADDING = 1024
"""Vocabularies of the same tokenizer differ by as much, because sizes are rounded up to multiples. The replicas compare
the tokenizers themselves."""


LARGEST_TEMPLATE = 1 << 20
"""Bytes of a file with a template."""


def mistakes_of(term: JudgeTerm) -> Iterator[Mistake]:
    """What is wrong with a judge on this machine."""
    judge = term.judge
    named, text = ("prompt", judge.prompt) if judge.prompt is not None else ("prompt_file", None)
    field, value = f"{term.field}.{named}", judge.prompt if named == "prompt" else judge.prompt_file
    if text is None:
        file_path = Path(judge.prompt_file or "")
        try:
            check_regular(file_path)
            with file_path.open("rb") as file:
                text = file.read(LARGEST_TEMPLATE + 1).decode()
            if len(text) > LARGEST_TEMPLATE:
                raise ValueError(f"more than {LARGEST_TEMPLATE} bytes")
        except (OSError, ValueError) as error:
            fix = "give the absolute path of a text file, which every replica's host has too."
            yield wrong_value(field, value, f"cannot be read: {getattr(error, 'strerror', None) or error}", fix)
    if text is not None:
        try:
            template.check(text, term.scope)
        except ValueError as error:
            yield wrong_value(field, value, str(error), "correct the template.")
    try:
        re.compile(judge.pattern)
    except re.error as error:
        reason = f"is not a regular expression: {error}"
        yield wrong_value(f"{term.field}.pattern", judge.pattern, reason, "correct it.")

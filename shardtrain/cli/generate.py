"""`shardtrain generate RUN`: continue texts with a trained model.

Next: `saved_run.py`, which opens the run; `models/generate.py`, which adds the tokens.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from shardtrain.cli.arguments import list_too_small
from shardtrain.cli.saved_run import SavedOptions, SavedRun, open_run, use_model
from shardtrain.data.tokenizer import Tokenizer, open_tokenizer
from shardtrain.errors.messages import refuse
from shardtrain.functional.rng import new_key
from shardtrain.imported import EOS, TOKENS, token_numbers
from shardtrain.system import terminal
from shardtrain.system.plain_text import MARK, read_lines, text_lines
from shardtrain.system.untrusted_data import parse_record

STANDARD_INPUT = "-"

MOST_TOKENS = 100
"""Number of tokens to add if no option sets it."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SavedOptions):
    """Continue texts with a trained model; without prompts, the text of standard input is continued.

    Args:
      prompt: text to continue. The option may be given several times.
      prompts: file of prompts, one in each line that is not blank. In a .jsonl file each line is a JSON
        object with a text "prompt". - means standard input.
      tokens: largest number of tokens to add. None means 100, or fewer if the model has fewer positions.
      temperature: number by which logits are divided. 0 always takes the likeliest token.
      top_k: draw only from this number of likeliest tokens. None draws from all.
      top_p: draw only from the fewest likeliest tokens that together have this probability.
      seed: seed of the draws.
      begin: number of the token that begins each target of an encoder-decoder; the prompts are then its
        sources. None means the padding of the run's data, or 0, for encoder-decoders of this library, and
        that any other model is a decoder.
      end: text of the token that ends a text. None means the tokens that generation_config.json or else
        config.json names, in the folder of the imported model or of the tokenizer; if they name none, or if
        the model was trained here, the token that ends documents. The word none means that no token ends a
        text.
      batch: number of prompts to continue at the same time.
      json: print JSON lines with prompt, text, number of tokens, and whether the text ended.
    """

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompts: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    begin: int | None = None
    end: str | None = None
    batch: int = 16
    json: bool = False

    def check(self) -> None:
        """Refuse numbers out of range, all at once.

        Raises:
          ValueError: lists them.
        """
        wrong = list_too_small({"tokens": self.tokens, "batch": self.batch})
        if not 0 <= self.seed < 2**32:
            wrong.append(f"--seed is {self.seed}; use a number from 0 to 2**32 - 1")
        if self.prompt and self.prompts is not None:
            wrong.append("--prompt and --prompts are given; give one of the two")
        refuse("this cannot be generated", wrong)


def main(arguments: Sequence[str]) -> int:
    """Print the continuations of prompts; return 0."""
    return use_model("generate", GenerateOptions, arguments, _print_continuations)


def _print_continuations(options: GenerateOptions) -> None:
    sampling = import_module("shardtrain.models.sampling").Sampling(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    saved = open_run(options)
    tokenizer = open_tokenizer(saved.tokenizer, None if options.end == "none" else options.end)
    prompts = read_prompts(options)
    for number, found in enumerate(_continue(saved, tokenizer, prompts, sampling, options)):
        if options.json:
            terminal.out(json.dumps(found) + "\n")
        else:
            before = "" if find_begin(saved, options) is not None else found["prompt"]
            terminal.out(("-" * 20 + "\n") * (number > 0) + f"{before}{found['text']}\n")


def read_prompts(options: GenerateOptions) -> list[str]:
    """Return the prompts that options name.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there are no prompts, or a line is not an object with a prompt.
    """
    if options.prompt:
        return list(options.prompt)
    if options.prompts is None:
        if sys.stdin.isatty():
            raise ValueError(
                "no prompt was given; give --prompt TEXT, --prompts FILE, or text on standard input"
            )
        return [sys.stdin.read().lstrip(MARK)]
    is_piped = options.prompts == STANDARD_INPUT
    lines = text_lines(sys.stdin.read()) if is_piped else read_lines(Path(options.prompts))
    if not lines:
        raise ValueError(f"{options.prompts} has no prompts; write one in each line")
    if not options.prompts.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_read_prompt(line, f"{options.prompts}:{number}") for number, line in lines]


def _read_prompt(line: str, where: str) -> str:
    try:
        found = parse_record(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise ValueError(f'{where} is no object with a text "prompt", such as {{"prompt": "Once"}}')
    return found


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, saved: SavedRun, options: GenerateOptions
) -> list[np.ndarray]:
    """Return the tokens of each prompt.

    Raises:
      ValueError: lists the prompts that the model cannot continue, and the options that do not fit it.
    """
    found = tokenizer.encode(list(prompts))
    vocab = getattr(saved.run.model, "vocab", tokenizer.vocab)
    num_tokens, seq, begin = options.tokens or 1, saved.seq, find_begin(saved, options)
    is_pair = begin is not None
    most = (seq if is_pair else seq - num_tokens) if saved.takes_cache or is_pair else math.inf
    problems = []
    if saved.is_decoder and is_pair:
        problems.append(f"--begin is {begin}, and the model is a decoder, which has no targets; leave it out")
    elif begin is not None and not 0 <= begin < vocab:
        problems.append(f"--begin is {begin}; use a token from 0 to {vocab - 1}")
    if is_pair and num_tokens > seq:
        problems.append(
            f"--tokens is {num_tokens}, but targets have {seq} positions; use --tokens {seq} or fewer"
        )
    for number, tokens in enumerate(found):
        where = f"prompt {number + 1}" if len(found) > 1 else "the prompt"
        if not len(tokens):
            problems.append(f"{where} is empty; give a text, such as the token that begins one")
        elif tokens.max() >= vocab:
            problems.append(
                f"{where} has token {tokens.max()}, and the model's vocabulary is {vocab:,}; give the"
                " tokenizer of the run: --tokenizer PATH"
            )
        elif len(tokens) > most:
            added = "" if is_pair else f" and {num_tokens} are added,"
            fits = f"--tokens {seq - len(tokens)}" if len(tokens) < seq else "a shorter prompt"
            problems.append(
                f"{where} has {len(tokens)} tokens,{added} but the model has {seq} positions; use {fits}"
            )
    refuse("these prompts cannot be continued", problems)
    return found


def _continue(
    saved: SavedRun, tokenizer: Tokenizer, prompts: Sequence[str], sampling: Any, options: GenerateOptions
) -> Iterator[dict[str, Any]]:
    """Yield each prompt (or source) with its continuation (or target).

    "text" has no token that ends it; "num_tokens" counts the added tokens; "ended" says whether the last of
    them ends a text.
    """
    tokens = encode_prompts(prompts, tokenizer, saved, options)
    restored = saved.restore()
    begin = find_begin(saved, options)
    room = saved.seq - (0 if begin is not None else max(map(len, tokens)))
    is_bound = saved.takes_cache or begin is not None
    num_tokens = options.tokens or (min(MOST_TOKENS, room) if is_bound else MOST_TOKENS)
    ends = _find_ends(saved, tokenizer, options.end)
    found = import_module("shardtrain.models.generate").generate(
        restored.apply,
        tokens,
        num_tokens,
        new_key(options.seed),
        seq=saved.seq,
        sampling=sampling,
        end=ends,
        rows=restored.round_rows(min(options.batch, len(prompts))),
        cached=saved.takes_cache,
        begin=begin,
    )
    for prompt, before, added in zip(prompts, tokens, found, strict=True):
        ended = bool(len(added)) and int(added[-1]) in ends
        shown = (added[:-1] if ended else added).tolist()
        text = tokenizer.decode(shown)
        if begin is None:
            # decoded together, as some tokenizers write a first token in another way
            whole, start = tokenizer.decode([*before.tolist(), *shown]), tokenizer.decode(before.tolist())
            text = whole[len(start) :] if whole.startswith(start) else text
        yield {"prompt": prompt, "text": text, "num_tokens": len(added), "ended": ended}


def _find_ends(saved: SavedRun, tokenizer: Tokenizer, end: str | None) -> tuple[int, ...]:
    """Return the tokens that end a text: the given one, or else the ones of the import or the tokenizer.

    A model that was trained here ends documents by the separator, whatever its configuration names.
    """
    if end is not None:
        return () if end == "none" else (tokenizer.separator,)
    extra = saved.reader.extra
    named = token_numbers(extra.get(TOKENS) or {}, EOS, f"{saved.folder}, step {saved.reader.step}")
    return (*([] if "imported" in extra else [tokenizer.separator]), *(named or tokenizer.ends))


def find_begin(saved: SavedRun, options: GenerateOptions) -> int | None:
    """Return the token that begins each target; None for a decoder."""
    if options.begin is not None or not saved.is_encoder_decoder:
        return options.begin
    padding = saved.options.get("data.padding")
    return padding if isinstance(padding, int) else 0

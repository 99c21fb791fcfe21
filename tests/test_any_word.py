"""Any word of the command line: it is taken, or refused in a few words, before anything starts."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from recipes import (
    bounds,
    command_line,
    config,
    earlier_run,
    foresight,
    launch,
    named_paths,
    network,
)
from recipes.config import Config

CONF = Path(__file__).parent.parent / "conf"
# A group is chosen by name, by other ways of Hydra's.
KEYS = sorted({*config.known_keys(), "model.arguments.scale"} - {*command_line.GROUPS})
# What a key of any type may be given, as a word of the command line.
WORDS = (
    *("", "null", "true", "false", "0", "-1", "1", "2", "0.5", "-0.0", "1e400", "1e-400", "nan"),
    *("inf", "-inf", f"{2**31}", f"{2**63 - 1}", f"{2**63}", f"{2**64}", "9" * 400, "1_000"),
    *("0x10", "1e9", "auto", "x", ".", "..", "/", "//", "~", "???", "[]", "{}", "[[]]", "[1,2]"),
    *("[null]", "[nan]", "[a]", "{a:1}", "{a:{b:[1]}}", "{1:2}", "{null:1}", "1x2", "a b", "a=b"),
    *("h:1", "h:-1", "h:99999999", ":1", "[::1]:6170", "a..b", "${seed}", "${nope}", "${", "$"),
    *("${oc.env:NOPE}", "${oc.env:HOME}", "${now:%Y}", "${hydra:run.dir}", "${model}", "${.}"),
    *("range(3)", "choice(1,2)", "glob(*)", "sort(2,1)", "int(3)", "str(3)", "1,2", "'", '"', "\\"),
    *("'\0'", "'\x1b[31m'", "'a\nb'", "'\udcff'", "\u00e4", "\u0663", "\u2028", "a" * 300),
    *("a" * 5000, "a/" * 3000, "b/" * 2040, "c/" * 1700, "/dev/null", "/proc/self/mem", "!"),
    *("/etc/passwd", "@", "--", "~nobody-of-that-name/x", "~/x", "~root/x"),
)
ANY = (
    st.sampled_from(WORDS)
    | st.integers(-(2**70), 2**70).map(str)
    | st.floats().map(str)
    | st.text(st.characters(), max_size=12)
    | st.text("0123456789.,:[]{}()${}'\"\\ =~+-@xe", max_size=12)
)
BESIDES = (
    *("seed=0", "topology=2x1", "task=evaluate", "task=benchmark", "task=prepare"),
    *("dataset=imagenet", "dataset=cifar10", "dataset=synthetic"),
)


@functools.cache
def base(besides: str) -> DictConfig:
    config.register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[besides])


def composed(words: list[str], folder: Path) -> DictConfig:
    """As the parent of a run composes."""
    line = command_line.read(words)
    found, _ = config.compose_unchecked(CONF, list(line.settings))
    return earlier_run.with_its_settings(found, line.settings, folder, CONF)


def quickly_composed(key: str, word: str, besides: str, folder: Path) -> DictConfig:
    """The same for one setting, without composing anew, which takes a tenth of a second."""
    found = copy.deepcopy(base(besides))
    try:
        (override,) = OverridesParser.create().parse_overrides([f"{key}={word}"])
        assume(not override.is_sweep_override())
        value, adds = override.value(), key.startswith("model.arguments.")
        OmegaConf.update(found, override.key_or_group, value, force_add=adds)
    except config.MISTAKES:
        raise
    except config.HYDRAS_OWN as error:
        raise config.not_composed(error, [f"{key}={word}"]) from error
    return earlier_run.with_its_settings(found, [f"{key}={word}"], folder, CONF)


def before_the_start(whole: DictConfig) -> Config:
    """What the parent of a run sees to before it makes anything."""
    found = config.from_hydra(whole)
    named_paths.check(found)
    foresight.check(found)
    launch.identify(found)
    launch.check_checkpoint(found)
    network.environment(found, None, {})
    return found


def assert_told(mistake: Exception) -> None:
    told = config.explain(mistake)
    assert told.strip()
    assert "Traceback" not in told
    assert len(told) < 2 * bounds.LONGEST_TEXT  # where it names a path, whole
    assert told.replace("\n", "").isprintable()


def assert_reads_back(found: Config, folder: Path) -> None:
    text = config.dump(found)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert config.dump(config.load(folder / "config.yaml")) == text


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(KEYS), word=ANY, besides=st.sampled_from(BESIDES))
@example(key="prepare", word="${seed}", besides="seed=0")
@example(key="epochs", word="'\udcff'", besides="seed=0")
@example(key="schedule.milestones", word="[[]]", besides="seed=0")
@example(key="resume", word="'\0'", besides="seed=0")
@example(key="log.images", word="a/" * 3000, besides="seed=0")
@example(key="resume", word="${model}", besides="seed=0")
@example(key="checkpoint", word="${log}", besides="task=evaluate")
@example(key="resume", word="a" * 5000, besides="seed=0")
@example(key="resume", word="b/" * 2040, besides="seed=0")
@example(key="model.pretrained", word="~nobody-of-that-name/x", besides="seed=0")
@example(key="checkpoint", word="c/" * 1700, besides="task=evaluate")
@example(key="dataset.path", word="b/" * 2040, besides="dataset=imagenet")
def test_any_word_for_any_setting_is_taken_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, key: str, word: str, besides: str
) -> None:
    folder = tmp_path_factory.mktemp("run")
    try:
        found = before_the_start(quickly_composed(key, word, besides, folder))
    except config.MISTAKES as mistake:
        assert_told(mistake)
    else:
        assert_reads_back(found, folder)


@settings(max_examples=15, deadline=None)
@given(
    key=st.sampled_from([*KEYS, *command_line.GROUPS, "hydra.run.dir"]),
    word=ANY,
    sign=st.sampled_from(["", "", "+", "++", "~"]),
)
@example(key="schedule", word="[[]]", sign="")
@example(key="optimizer", word="'\0'", sign="")
@example(key="dataset", word="a/" * 3000, sign="")
@example(key="seed", word="9" * 5000, sign="")
def test_any_word_of_the_command_line_is_taken_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, key: str, word: str, sign: str
) -> None:
    config.register_schema()
    folder = tmp_path_factory.mktemp("run")
    try:
        found = before_the_start(composed([f"{sign}{key}={word}"], folder))
    except config.MISTAKES as mistake:
        assert_told(mistake)
    else:
        assert_reads_back(found, folder)

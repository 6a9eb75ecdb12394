"""Each method has one style, and pictures have the same bytes every time."""

import matplotlib

from fewer.data import Data
from fewer.methods import names
from fewer.report.pictures import plot_partition
from fewer.report.style import COLORS, LineStyle, assign_label_styles, assign_styles, png, svg, theme
from tests.report.harness import THREE_SEEDS, plot_by_megabyte, plot_by_round, round_metrics


def test_a_method_has_one_style_in_all_pictures_of_a_page() -> None:
    histories = {"fedavg": THREE_SEEDS, "fedbn": THREE_SEEDS, "late": [[round_metrics(1, None)]]}
    first, second = plot_by_round(histories), plot_by_megabyte(histories)
    assert first and second
    styles = assign_styles(histories)
    for figure in (first, second):
        drawn = [
            LineStyle(str(curve.get_color()), str(curve.get_marker()), str(curve.get_linestyle()))
            for curve in figure.axes[0].lines
        ]
        assert drawn == [styles["fedavg"], styles["fedbn"]]


def test_methods_on_one_page_have_distinct_styles() -> None:
    methods = [*names(), *(f"method-{number}" for number in range(100))]
    for order in (methods, methods[::-1]):
        assert len({style.color for style in assign_styles(order[:7]).values()}) == 7 == len(COLORS)
        assert len({(style.color, style.dash) for style in assign_styles(order[:28]).values()}) == 28
        assert len(set(assign_styles(order).values())) == len(methods)


def test_the_style_of_a_method_is_stable() -> None:
    single = assign_styles(["my-method"])
    assert single == {"my-method": ("#CC79A7", "D", "-")}  # the same in every version
    page = assign_styles(["my-method", "fedavg", "fedprox"])
    assert page["my-method"] == single["my-method"]
    more = assign_styles(["another", "fedprox"], page)  # later methods do not change earlier ones
    assert {method: more[method] for method in page} == page and len(set(more.values())) == 4


def test_variants_of_a_method_share_its_color_and_nothing_else() -> None:
    methods = {"fedavg": "fedavg", **{f"fedavg lr={number}": "fedavg" for number in range(20)}, "fedbn": "fedbn"}
    styles = assign_label_styles(methods)
    assert len(set(styles.values())) == len(methods)
    assert {style.color for label, style in styles.items() if methods[label] == "fedavg"} == {styles["fedavg"].color}
    assert styles["fedavg"] == assign_styles(["fedavg", "fedbn"])["fedavg"]
    crowd = assign_label_styles({f"{method} {number}": method for number in range(2) for method in names()[:14]})
    assert len(set(crowd.values())) == 28
    own = {f"mine {number}": f"mine {number % 3}" for number in range(150)}
    assert len(set(assign_label_styles(own).values())) == 150
    assert len(assign_label_styles({str(number): "fedavg" for number in range(300)})) == 300  # repeats, but no failure


def test_the_users_matplotlib_settings_are_unchanged() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"axes.grid": False, "text.usetex": True}):
        figure = plot_by_round({"$\\fedavg$": THREE_SEEDS})
        assert figure
        png(figure)
        assert matplotlib.rcParams["text.usetex"] and not matplotlib.rcParams["axes.grid"]
        with theme():
            assert matplotlib.rcParams["axes.grid"]
    assert dict(matplotlib.rcParams) == before


def test_the_same_picture_gives_the_same_bytes(digits: Data) -> None:
    assert png(plot_partition(digits)) == png(plot_partition(digits))
    assert svg(plot_partition(digits)) == svg(plot_partition(digits))

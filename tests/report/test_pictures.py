"""Pictures of data: partitions, examples and synthetic images."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import fewer
from fewer.data import ArrayData, Data, from_arrays
from fewer.report.pictures import class_counts, plot_examples, plot_image_grid, plot_partition
from fewer.report.style import png


def bubbles(figure: Figure) -> tuple[np.ndarray, np.ndarray]:
    (scatter,) = figure.axes[0].collections
    return np.asarray(scatter.get_offsets()).astype(int), scatter.get_sizes()  # type: ignore[attr-defined]


def test_bubbles_match_the_counts(digits: Data) -> None:
    counts = np.zeros((len(digits), digits.classes), int)
    for client in range(len(digits)):
        for label in digits.client(client).train.slice(0, 9999)[1].tolist():
            counts[client, label] += 1
    np.testing.assert_array_equal(class_counts(digits), counts)
    positions, areas = bubbles(plot_partition(digits))
    assert len(positions) == (counts > 0).sum()
    shown = counts[positions[:, 0], positions[:, 1]]
    np.testing.assert_allclose(areas / shown, areas[0] / shown[0])


def test_only_the_first_sixty_clients_are_shown() -> None:
    data = fewer.data.load("digits", clients=70, partition="iid")
    figure = plot_partition(data)
    assert bubbles(figure)[0][:, 0].max() == 59
    assert "first 60 of 70 clients" in figure.get_suptitle()


def with_class_names(data: ArrayData, *names: str) -> ArrayData:
    return ArrayData(**{**vars(data), "class_names": names})


def test_classes_have_their_names() -> None:
    data = with_class_names(from_arrays(np.zeros((40, 5), np.float32), np.arange(40) % 3, clients=2), "a", " ", "$c_1$")
    labels = plot_partition(data).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["a", "' '", "$c_1$"]


def test_examples_show_images_of_each_class(digits: Data) -> None:
    figure = plot_examples(digits, columns=3)
    assert figure
    (image,) = figure.axes[0].images
    shown = np.asarray(image.get_array())
    assert shown.shape == (10 * 9 - 1, 3 * 9 - 1, 3)
    x, y = digits.test.x, digits.test.y
    third_two = x[np.flatnonzero(y == 2)[2], 0].numpy() / 255
    np.testing.assert_allclose(shown[2 * 9 : 2 * 9 + 8, 2 * 9 : 2 * 9 + 8, 0], third_two)


@pytest.mark.parametrize("channels", [1, 3])
def test_examples_show_at_most_twenty_classes(channels: int) -> None:
    x = np.random.default_rng(0).standard_normal((500, channels, 6, 5)).astype(np.float32)
    figure = plot_examples(from_arrays(x, np.arange(500) % 25, clients=2, partition="iid"))
    assert figure and "20 of 25 classes" in figure.get_suptitle()
    assert len(figure.axes[0].get_yticks()) == 20
    assert png(figure)


def test_examples_show_time_series_as_lines() -> None:
    x = np.random.default_rng(0).standard_normal((200, 9, 16)).astype(np.float32)
    figure = plot_examples(from_arrays(x, np.arange(200) % 4, clients=2, partition="iid"), columns=5)
    assert figure and "first 3 of 9 channels" in figure.get_suptitle()
    assert len(figure.axes[0].lines) == 4 * 5 * 3


def test_text_and_features_have_no_examples() -> None:
    labels = np.arange(60) % 2
    assert plot_examples(from_arrays(np.zeros((60, 7), np.float32), labels, clients=2)) is None
    assert plot_examples(from_arrays(["good film", "bad film"] * 30, labels, clients=2)) is None


def test_synthetic_images_are_shown_by_row_and_class_in_the_pixel_range(digits: Data) -> None:
    seen, labels = digits.test.slice(0, 50)
    threes = seen[labels == 3][:2].numpy()
    out_of_range = np.full((1, 1, 8, 8), 1e3, np.float32)
    figure = plot_image_grid(
        digits, "Made", {"client 4": {3: threes}, "client 7": {0: out_of_range, 2: -out_of_range}}, max_per_class=2
    )
    assert figure
    axes = figure.axes[0]
    shown = np.asarray(axes.images[0].get_array())[..., 0]
    assert shown.shape == (2 * 9 - 1, 20 * 9 - 1 + 2 * 9)  # two pixels more between classes
    pixels = digits.test.x[torch.nonzero(labels == 3)[:2, 0], 0].numpy() / 255
    for index, left in enumerate((3 * 20, 3 * 20 + 9)):
        np.testing.assert_allclose(shown[:8, left : left + 8], pixels[index], atol=1e-5)
    assert (shown[:8, : 3 * 20] == 1).all() and (shown[:8, 4 * 20 :] == 1).all()  # blank
    assert (shown[9:, :8] == 1).all() and (shown[9:, 2 * 20 : 2 * 20 + 8] == 0).all()  # cut off
    assert [text.get_text() for text in axes.get_yticklabels()] == ["client 4", "client 7"]
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(label) for label in range(10)]
    assert axes.get_xticks()[3] == pytest.approx(3 * 20 + 8)
    assert plot_image_grid(digits, "Made", {"client 4": {}}) is None
    readings = from_arrays(np.zeros((40, 5), np.float32), np.arange(40) % 3, clients=2)
    assert plot_image_grid(readings, "Made", {"client 0": {0: np.zeros((1, 5))}}) is None


def test_the_lowest_value_is_black_if_data_is_not_pixels() -> None:
    x = np.random.default_rng(0).standard_normal((60, 1, 4, 4)).astype(np.float32)
    synthetic = np.linspace(-9, 3, 16, dtype=np.float32).reshape(1, 1, 4, 4)
    figure = plot_image_grid(from_arrays(x, np.arange(60) % 2, clients=2), "Made", {"client 0": {0: synthetic}})
    assert figure
    shown = np.asarray(figure.axes[0].images[0].get_array())[:4, :4, 0]
    np.testing.assert_allclose(shown.flatten(), np.linspace(0, 1, 16), atol=1e-6)

"""What a figure of matplotlib shows, as data: its kind, its labels, its points. Clients draw it in their own way."""

import re

from matplotlib import dates
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle, Wedge
from matplotlib.text import Text

# "Length (m)" and "Length [m]".
UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")
# The vertices of the box of a boxplot.
BOX_POINTS = 5


def figure_chart(figure, values_max):
    """The chart of a figure; None if there is nothing in it, or more values than wanted."""
    axes = figure.get_axes()
    if not axes or count(axes) > values_max:
        return None
    if len(axes) == 1:
        return axes_chart(axes[0])
    # Newer versions have a method for it.
    title = figure._suptitle.get_text() if figure._suptitle else None
    return {"type": "superchart", "title": title, "elements": [axes_chart(one) for one in axes]}


def count(axes):
    lines = sum(len(line.get_xdata()) for one in axes for line in one.get_lines())
    points = sum(len(points.get_offsets()) for one in axes for points in one.collections)
    return lines + points + sum(len(one.patches) for one in axes)


def axes_chart(axes):
    title = axes.get_title() or None
    kind = kind_of(axes)
    if kind == "unknown":
        return {"type": kind, "title": title, "elements": []}
    if kind == "pie":
        return {"type": kind, "title": title, "elements": [slice_data(wedge) for wedge in axes.patches]}
    chart = {"type": kind, "title": title, **labels(axes)}
    if kind in ("line", "scatter"):
        chart.update(scales(axes))
        chart["elements"] = line_data(axes) if kind == "line" else scatter_data(axes)
    elif kind == "bar":
        chart["elements"], is_lying = bar_data(axes)
        chart = turned(chart) if is_lying else chart
    else:
        chart["elements"], is_lying = box_data(axes)
        chart = turned(chart) if is_lying else chart
    return chart


def kind_of(axes):
    """The kind of a chart, by what is drawn in it."""
    drawn = [artist for artist in axes.get_children() if artist in own_artists(axes)]
    if not drawn:
        return "unknown"
    if all(isinstance(artist, Wedge) for artist in drawn):
        return "pie"
    if all(isinstance(artist, PathCollection) for artist in drawn):
        return "scatter"
    if boxes(axes) and all(isinstance(artist, (PathPatch, Line2D)) for artist in drawn):
        return "box_and_whisker"
    if all(isinstance(artist, Line2D) for artist in drawn):
        return "line"
    if all(isinstance(artist, Rectangle) for artist in drawn):
        return "bar"
    return "unknown"


def own_artists(axes):
    drawn = [*axes.lines, *axes.patches, *axes.collections, *axes.images]
    return [artist for artist in drawn if not isinstance(artist, Text)]


def labels(axes):
    x, y = axes.get_xlabel() or None, axes.get_ylabel() or None
    return {"x_label": x, "x_unit": unit(x), "y_label": y, "y_unit": unit(y)}


def unit(label):
    found = UNIT.search(label) if label else None
    return (found.group(1) or found.group(2)) if found else None


def turned(chart):
    """A chart whose values lie on the x axis."""
    swapped = {"x_label": "y_label", "x_unit": "y_unit", "y_label": "x_label", "y_unit": "x_unit"}
    return {**chart, **{key: chart[other] for key, other in swapped.items()}}


def scales(axes):
    found = {}
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        found[f"{name}_ticks"] = ticks(axis)
        found[f"{name}_tick_labels"] = [label.get_text() for label in axis.get_ticklabels()]
        found[f"{name}_scale"] = scale(axis)
    return found


def scale(axis):
    if is_time(axis):
        return "datetime"
    if type(axis.converter).__name__ == "StrCategoryConverter":
        return "categorical"
    return axis.get_scale()


def is_time(axis):
    return isinstance(axis.get_major_locator(), dates.DateLocator)


def ticks(axis):
    if is_time(axis):
        return [dates.num2date(tick).isoformat() for tick in axis.get_ticklocs()]
    return [float(tick) for tick in axis.get_ticklocs()]


def line_data(axes):
    def points(line):
        return list(zip(as_list(line.get_xdata()), as_list(line.get_ydata())))

    return [{"label": line.get_label(), "points": points(line)} for line in axes.get_lines()]


def scatter_data(axes):
    def points(collection):
        x_time, y_time = is_time(axes.xaxis), is_time(axes.yaxis)
        return [(moment(x, x_time), moment(y, y_time)) for x, y in collection.get_offsets().tolist()]

    return [{"label": one.get_label(), "points": points(one)} for one in axes.collections]


def moment(value, is_a_time):
    return dates.num2date(value).isoformat() if is_a_time else value


def as_list(values):
    return [value.isoformat() if hasattr(value, "isoformat") else getattr(value, "item", lambda: value)()
            for value in values]


def bar_data(axes):
    bars = [container for container in axes.containers if isinstance(container, BarContainer)]
    is_lying = any(container.orientation == "horizontal" for container in bars)
    axis = axes.yaxis if is_lying else axes.xaxis
    names = [label.get_text() for label in axis.get_ticklabels()]
    elements = []
    for container in bars:
        for place, bar in enumerate(container):
            value = bar.get_width() if is_lying else bar.get_height()
            name = names[place] if place < len(names) else str(place)
            elements.append({"label": name, "group": container.get_label(), "value": value})
    return elements, is_lying


def slice_data(wedge):
    angle = abs(round(wedge.theta2 - wedge.theta1, 4))
    return {"label": wedge.get_label(), "angle": angle, "radius": wedge.r}


def boxes(axes):
    """The boxes of a boxplot: closed lines of five points, or patches."""
    patches = [patch for patch in axes.patches if isinstance(patch, PathPatch)]
    outlines = [line for line in axes.lines if len(line.get_xdata()) == BOX_POINTS and is_closed(line)]
    return patches or outlines


def is_closed(line):
    x, y = line.get_xdata(), line.get_ydata()
    return x[0] == x[-1] and y[0] == y[-1]


def box_data(axes):
    """Median, quartiles, whiskers and outliers of each box, by the order in which matplotlib draws them."""
    found = boxes(axes)
    corners = [outline(box) for box in found]
    medians = [line for line in axes.lines if len(line.get_xdata()) == 2]
    is_lying = all(same([y for _, y in corner][:2]) is False for corner in corners)
    across = 1 if is_lying else 0
    names = [label.get_text() for label in (axes.yaxis if is_lying else axes.xaxis).get_ticklabels()]
    elements = []
    for place, corner in enumerate(corners):
        side = [point[across] for point in corner]
        values = [point[1 - across] for point in corner]
        inside = [ends(line, across) for line in medians]
        own = [found for found in inside if min(side) <= found[0][0] and found[0][1] <= max(side)]
        label = names[place] if place < len(names) else str(place)
        elements.append(box_element(label, min(values), max(values), own, outliers(axes, across, side)))
    return elements, is_lying


def outline(box):
    if isinstance(box, PathPatch):
        return [tuple(point) for point in box.get_path().vertices[:BOX_POINTS].tolist()]
    return list(zip(as_list(box.get_xdata()), as_list(box.get_ydata())))


def ends(line, across):
    """The extent of a line across its box, and along its values."""
    data = (as_list(line.get_xdata()), as_list(line.get_ydata()))
    return sorted(data[across]), sorted(data[1 - across])


def box_element(label, low, high, own, apart):
    medians = [value for side, (value, end) in own if value == end and low <= value <= high and side[0] != side[1]]
    below = [value for side, (value, end) in own if side[0] == side[1] and end == low]
    above = [end for side, (value, end) in own if side[0] == side[1] and value == high]
    return {
        "label": label,
        "min": min(below, default=low),
        "first_quartile": low,
        "median": medians[0] if medians else low,
        "third_quartile": high,
        "max": max(above, default=high),
        "outliers": apart,
    }


def outliers(axes, across, side):
    apart = []
    for line in axes.lines:
        if line.get_linestyle() in ("None", "none", "") and line.get_marker() not in ("None", "none", "", None):
            data = (as_list(line.get_xdata()), as_list(line.get_ydata()))
            points = zip(data[across], data[1 - across])
            apart.extend(value for place, value in points if min(side) <= place <= max(side))
    return apart


def same(values):
    return all(value == values[0] for value in values)

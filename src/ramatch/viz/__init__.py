"""Heat maps and plan pictures: the paper's three views of a prediction, for any image."""

from ramatch.viz._sheet import save
from ramatch.viz.charts import chart
from ramatch.viz.overlay import overlay
from ramatch.viz.pictures import compare_matchers, explanation, label_pictures, plan_picture

__all__ = ["chart", "compare_matchers", "explanation", "label_pictures", "overlay", "plan_picture", "save"]

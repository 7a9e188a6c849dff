from .answer_metrics import can_stem as can_stem
from .answer_metrics import exact_match as exact_match
from .answer_metrics import stemmed_f1 as stemmed_f1
from .answer_metrics import string_match as string_match
from .answer_metrics import token_f1 as token_f1
from .bootstrap import Bootstrap as Bootstrap
from .bootstrap import Interval as Interval
from .bootstrap import questions_as_clusters as questions_as_clusters

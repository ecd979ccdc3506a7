"""pandas, scipy and scikit-learn with joblib's processes."""

import numpy as np
import pandas as pd
import scipy.stats
from scipy import linalg
from joblib.externals.loky import get_reusable_executor
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

if __name__ == "__main__":
    frame = pd.DataFrame({"a": np.arange(6), "b": list("ababab")})
    print(frame.groupby("b").a.sum().to_dict(), scipy.stats.norm.cdf(1.0).round(6))
    print(np.round(linalg.inv(np.eye(3) * 2), 3).tolist())
    x, y = make_classification(200, random_state=0)
    print(cross_val_score(LogisticRegression(), x, y, cv=3, n_jobs=2).round(4).tolist())
    get_reusable_executor().shutdown(wait=True)

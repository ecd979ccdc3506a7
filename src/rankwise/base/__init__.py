"""Words that every part of rankwise uses: units, errors, failures, the shape of a machine."""

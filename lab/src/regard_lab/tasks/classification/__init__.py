"""Classification of texts and images: data, options, training, metrics, trained classifiers."""

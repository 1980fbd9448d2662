"""The demo model that learned: corpus, tasks, network, training, evaluation."""

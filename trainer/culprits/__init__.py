"""Why a planned step is not the whole-batch step: which modules, which loss, which setting."""

"""What the model itself says, apart from any engine: greedy tokens and the logprobs of given tokens."""

import torch
from engines.contract import scripted
from engines.kit import other_weights
from transformers import AutoModelForCausalLM


class ModelTruth:
    """Of a model folder (version 0), or of `other_weights` of it (version 1)."""

    tolerance = 2e-3

    def __init__(self, path, version):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if version:
            self.model = other_weights(path)

    def logprobs(self, ids, made, temperature):
        with torch.no_grad():
            logits = self.model(torch.tensor([[*ids, *made]])).logits[0, len(ids) - 1 : -1]
        table = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
        return [float(table[at, token]) for at, token in enumerate(made)]

    def weights(self):
        return self.model.named_parameters()


class HashTruth:
    """Of the scripted server."""

    tolerance = 1e-5

    def __init__(self, label):
        self.label = label

    def logprobs(self, ids, made, temperature):
        so_far, found = list(ids), []
        for token in made:
            found.append(scripted.logprob_of(so_far, token, self.label))
            so_far.append(token)
        return found


def truth_of(kind, version):
    """`version` 1 is that of the weights that `publish` brings."""
    if kind.scripted:
        return HashTruth("1" if version else "default")
    return ModelTruth(kind.model, version)

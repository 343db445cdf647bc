"""A share of every parameter, its gradient and its moments on each rank: torch's fully_shard (FSDP2), one unit per layer.

A layer's weights are gathered while it computes; Muon gathers the matrix that it orthogonalises. Where whole weights are needed, for dev
and for checkpoints, they are gathered into the model that the caller gave, on every rank. Checkpoints are those of one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, Parameter
from torch.nn.utils import get_total_norm

from cramlm.errors import UsageError
from cramlm.model.model import Model
from cramlm.training.distributed import Ranks


class Sharded:
    """A share of every parameter on each rank."""

    def __init__(self, model: Model, ranks: Ranks) -> None:
        if model.head_config.generator is not None:
            raise UsageError(
                "distributed.parallel = 'fsdp2' cannot train a generator (head.generator), which reads another encoder's word embedding; "
                "pass --set distributed.parallel=ddp"
            )
        self._model, self.ranks = model, ranks
        self.trained, self.parts = copy.deepcopy(model), 1  # its gradients are exchanged inside the one backward pass
        mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.count,))
        layers = () if model.encoder_config.shape == "albert" else self.trained.encoder.layers  # its one layer is passed several times
        places = [self.trained.place_head] if model.head_config.has_places else []
        for module in (*layers, *places, self.trained.mlm_head, self.trained.classifier):
            _shard(module, mesh)
        # The token embedding is read again by the vocabulary head, so what the encoder gathers stays until its backward pass.
        _shard(self.trained.encoder, mesh, reshard_after_forward=False)

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """The backward pass has done it."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return _gathered(get_total_norm(gradients))

    def settle(self) -> None:
        whole = self.whole(dict(self.trained.named_parameters()))
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(whole[name])

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self.ranks.exchanging():
            return {name: _gathered(tensor.detach()) for name, tensor in tensors.items()}

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = dict(self.trained.named_parameters())
        result: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            parameter = next(parameters[part] for part in name.split("/") if part in parameters)
            assert isinstance(parameter, DTensor)
            if tensor.shape == parameter.shape:  # counters of steps have none
                result[name] = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
            else:
                result[name] = tensor
        return result


def _shard(module: Module, mesh: DeviceMesh, *, reshard_after_forward: bool = True) -> None:
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # shares of a sum, not means
    module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

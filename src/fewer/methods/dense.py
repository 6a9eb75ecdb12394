"""DENSE: the server distills the ensemble of client models into one model, on images from a generator.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022, Algorithm 1. f_k
are the models of m clients, f_S is the global model (the student), G the generator.

- Ensemble (Eq 1): D(x) = (1/m) Σ_k f_k(x), of logits.
- Data generation, `generator_loss` (Eqs 2-5): for noise z, labels y and images x = G(z),

      L_gen = CE(D(x), y) + λ₁ L_BN + λ₂ L_div
      L_BN  = (1/m) Σ_k Σ_layers ‖μ(x) − μ_k‖ + ‖σ²(x) − σ²_k‖, of the inputs of batch norm layers
      L_div = −ω KL(D(x) ‖ f_S(x)),    ω = 1 if D and f_S predict different classes, else 0

- Model distillation, `distillation_loss` (Eq 6): f_S minimizes KL(D(x) ‖ f_S(x)).

Both alternate for `epochs` epochs. With more than one round, clients start from f_S, as in the paper's Section 3.4.

Departures:

- The images of the last `POOL` epochs are kept, and f_S takes several steps on them per epoch.
- The KL of the distillation has a temperature (1 is Eq 6).
- The generator's last layer standardizes its images, so that the server needs no statistics of the data.
- A smaller generator and fewer epochs, for CPUs. Local training as in FedAvg: a fixed number of steps.
- The released code resets the generator in each epoch, also learns the noise z, keeps the images of the best step, and
  has temperature 3 in L_div. Here the generator continues, which needs fewer steps; z is fixed; L_div is Eq 4 as
  printed.
- L_BN is 0 for nets without batch norm, such as the default net.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.errors import SettingError
from fewer.learning import LocalOptimizer
from fewer.learning.aggregate import stack_models, unstack_models
from fewer.learning.synthesis import NOISE, ImageGenerator, batch_norm_distances, kl_divergence
from fewer.methods import Group, ModelState, Needs, SearchSpace, Server
from fewer.methods.fedavg import LocalTraining, train_models
from fewer.methods.fedensemble import Ensemble
from fewer.models import Task, Weights, all_finite, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_server

POOL = 50
"""Batches of images that the server keeps."""
MOMENTUM = 0.9
"""Of the distillation."""


@METHODS.register("dense")
class Dense(LocalTraining[ModelState]):
    """One-shot: the server distills the ensemble of client models into one, on images from a generator."""

    group: ClassVar[Group] = "one-shot"
    needs: ClassVar[Needs] = "classes"
    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "distill_lr": (0.003, 0.01, 0.03, 0.1)}

    rounds: PositiveInt = 1
    """Number of rounds; one is one-shot."""
    local_steps: PositiveInt = 400
    """Local steps per round."""
    epochs: PositiveInt = 50
    """Alternations of data generation and distillation on the server (T)."""
    generator_steps: PositiveInt = 10
    """Generator steps per epoch (T_G)."""
    generator_lr: PositiveFloat = 0.001
    """Learning rate of the generator (Adam)."""
    generator_width: PositiveInt = 16
    """Channels of the generator's last layer but one."""
    generator_batch_size: int = Field(default=128, ge=2)
    """Images per epoch, and per step of generation and distillation (b)."""
    bn_weight: NonNegativeFloat = 1.0
    """Weight of the batch norm loss (λ₁)."""
    adversarial_weight: NonNegativeFloat = 0.5
    """Weight of the images' disagreement between ensemble and student (λ₂)."""
    distill_steps: PositiveInt = 20
    """Steps of the student per epoch."""
    distill_lr: PositiveFloat = 0.01
    """Learning rate of the student."""
    temperature: PositiveFloat = 4.0
    """Temperature of the distillation."""

    def init(self, task: Task, seed: int) -> ModelState:
        """Initializes f_S."""
        if len(task.shape) != 3:
            raise SettingError(f"{self.name} generates images, but inputs have shape {task.shape}")
        return ModelState(task.initial_weights(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """Clients train f_k from the global model; the server distills their ensemble into it."""
        answers = train_models(clients, self.sample_cohort(clients), self.local_train, state.model)
        fields = {"model": state.model, "members": stack_models([answer["model"] for answer in answers])}
        (result,) = clients.map_on_server(self.distill_ensemble, [{}], **fields)
        if not result["finite"]:
            self.warn(clients, "distillation diverged, so the last model is kept; lower -o distill_lr")
        return ModelState(result["model"])

    @on_server
    def distill_ensemble(self, server: Server, model: Weights, members: Weights) -> dict[str, Any]:
        """Alternates data generation and model distillation. If it diverges, the model stays the same."""
        student, stream, size = server.net(model), server.stream("synthesis"), self.generator_batch_size
        ensemble = self.build_ensemble([server.net(weights) for weights in unstack_models(members)])
        generator = ImageGenerator(server.task.shape, self.generator_width).to(server.task.device)
        generator_parameters, parameters = list(generator.parameters()), list(student.parameters())
        optimizer = torch.optim.Adam(generator_parameters, self.generator_lr)
        step = LocalOptimizer(momentum=MOMENTUM, lr_schedule="cosine").make_step(
            list(parameters), self.distill_lr, self.epochs * self.distill_steps
        )
        pool: list[tuple[Tensor, Tensor]] = []
        for epoch in range(self.epochs):
            noise = torch.randn(size, NOISE, generator=stream).to(server.task.device)
            y = torch.randint(server.task.classes, (size,), generator=stream).to(server.task.device)
            student.eval()
            for _ in range(self.generator_steps):
                loss = self.generator_loss(ensemble, student, generator(noise), y)
                gradients = torch.autograd.grad(loss, generator_parameters)
                for parameter, gradient in zip(generator_parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            pool = [*pool[1 - POOL :], (generator(noise).detach(), y)]
            images, labels = (torch.cat(parts) for parts in zip(*pool, strict=True))
            batches = torch.randint(len(images), (self.distill_steps, size), generator=stream)
            self.improve_ensemble(ensemble, images, labels, batches, epoch)
            student.train()
            for batch in batches:
                x = self.transform_images(ensemble, images[batch], stream)
                gradients = torch.autograd.grad(self.distillation_loss(ensemble, student, x), parameters)
                with torch.no_grad():
                    step(gradients)
        trained = get_weights(student)
        finite = all_finite(trained)
        return {"model": trained if finite else model, "finite": finite}

    def build_ensemble(self, members: list[nn.Module]) -> Ensemble:
        """D(x) = (1/m) Σ_k f_k(x), whose weights need no gradients (Eq 1)."""
        ensemble = Ensemble(members)
        ensemble.eval().requires_grad_(False)
        return ensemble

    def generator_loss(self, ensemble: Ensemble, student: nn.Module, images: Tensor, y: Tensor) -> Tensor:
        """L_gen = CE(D(x), y) + λ₁ L_BN + λ₂ L_div (Eqs 2-5)."""
        (teacher, l_bn), logits = self.classify(ensemble, images), student(images)
        differs = (teacher.argmax(1) != logits.argmax(1)).float()  # ω
        l_div = -(differs * kl_divergence(teacher, logits)).mean()
        loss: Tensor = F.cross_entropy(teacher, y) + self.bn_weight * l_bn + self.adversarial_weight * l_div
        return loss

    def classify(self, ensemble: Ensemble, images: Tensor) -> tuple[Tensor, Tensor]:
        """D(x), and L_BN (Eq 3)."""
        with batch_norm_distances(list(ensemble.members)) as distances:
            teacher: Tensor = ensemble(images)
        return teacher, sum(distances, torch.zeros_like(teacher[0, 0])) / len(ensemble.members)

    def distillation_loss(self, ensemble: Ensemble, student: nn.Module, images: Tensor) -> Tensor:
        """KL(D(x) ‖ f_S(x)) (Eq 6)."""
        with torch.no_grad():
            teacher = ensemble(images)
        return kl_divergence(teacher, student(images), self.temperature).mean()

    def improve_ensemble(self, ensemble: Ensemble, images: Tensor, labels: Tensor, batches: Tensor, epoch: int) -> None:
        """Adapts the ensemble to the images, in place. Here it stays the same."""

    def transform_images(self, ensemble: Ensemble, images: Tensor, stream: torch.Generator) -> Tensor:
        """The images that the student learns from. Here they stay the same."""
        return images

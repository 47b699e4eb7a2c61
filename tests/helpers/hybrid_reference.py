"""Qwen3.5, dense, token by token in fp64: the formulas of docs/hybrid.md with loops, and nothing of the package."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """`run` returns the logits of every row [n, V] and the states behind it, by recurrent layer [HV, dk, dv]."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / 'config.json').read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / 'model.safetensors').items()}
        rope = self.config['rope_parameters']
        turned = int(self.config['head_dim'] * rope['partial_rotary_factor'])
        self.frequencies = rope['rope_theta'] ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)

    def run(self, ids: Sequence[int]) -> tuple[Tensor, list[list[Tensor]]]:
        config = self.config
        layers = range(config['num_hidden_layers'])
        memory: list[dict[str, Tensor]] = [{} for _ in layers]
        logits, states = [], []
        for position, token in enumerate(ids):
            x = self.weights['model.embed_tokens.weight'][token]
            for i in layers:
                name = f'model.layers.{i}'
                y = self.norm(x, f'{name}.input_layernorm')
                if config['layer_types'][i] == 'full_attention':
                    x = x + self.attention(y, f'{name}.self_attn', position, memory[i])
                else:
                    x = x + self.delta(y, f'{name}.linear_attn', memory[i])
                y = self.norm(x, f'{name}.post_attention_layernorm')
                inner = F.silu(self.times(y, f'{name}.mlp.gate_proj')) * self.times(y, f'{name}.mlp.up_proj')
                x = x + self.times(inner, f'{name}.mlp.down_proj')
            logits.append(self.times(self.norm(x, 'model.norm'), 'lm_head'))
            states.append([m['state'] for m in memory if 'state' in m])
        return torch.stack(logits), states

    def times(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f'{name}.weight'] @ x

    def rms(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config['rms_norm_eps']).sqrt()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.rms(x) * (1 + self.weights[f'{name}.weight'])

    def attention(self, x: Tensor, name: str, position: int, memory: dict[str, Tensor]) -> Tensor:
        heads, size = self.config['num_attention_heads'], self.config['head_dim']
        q, gate = self.times(x, f'{name}.q_proj').view(heads, 2, size).unbind(1)
        k, v = (self.times(x, f'{name}.{part}').view(-1, size) for part in ('k_proj', 'v_proj'))
        q, k = (self.rotate(self.norm(y, f'{name}.{n}'), position) for y, n in ((q, 'q_norm'), (k, 'k_norm')))
        for part, new in (('k', k), ('v', v)):
            memory[part] = torch.cat([memory.get(part, new[None, :0].reshape(0, *new.shape)), new[None]])
        group = heads // k.shape[0]
        keys, values = (memory[part].repeat_interleave(group, 1) for part in ('k', 'v'))
        weights = (torch.einsum('hd,lhd->hl', q, keys) / size**0.5).softmax(-1)
        read = torch.einsum('hl,lhd->hd', weights, values) * torch.sigmoid(gate)
        return self.times(read.flatten(), f'{name}.o_proj')

    def rotate(self, x: Tensor, position: int) -> Tensor:
        turned = 2 * len(self.frequencies)
        a, b = x[:, :turned].chunk(2, -1)
        cos, sin = (position * self.frequencies).cos(), (position * self.frequencies).sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[:, turned:]], -1)

    def delta(self, x: Tensor, name: str, memory: dict[str, Tensor]) -> Tensor:
        config = self.config
        key_heads, value_heads = config['linear_num_key_heads'], config['linear_num_value_heads']
        dk, dv = config['linear_key_head_dim'], config['linear_value_head_dim']
        z, b, a, row = (self.times(x, f'{name}.in_proj_{part}') for part in ('z', 'b', 'a', 'qkv'))
        taps = self.weights[f'{name}.conv1d.weight'][:, 0]
        window = torch.cat([memory.get('window', row.new_zeros(taps.shape[1], len(row)))[1:], row[None]])
        memory['window'] = window
        q, k, v = F.silu((window * taps.t()).sum(0)).split((key_heads * dk, key_heads * dk, value_heads * dv))
        q, k = (y.view(key_heads, dk).repeat_interleave(value_heads // key_heads, 0) for y in (q, k))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        g = -self.weights[f'{name}.A_log'].exp() * F.softplus(a + self.weights[f'{name}.dt_bias'])
        state = memory.get('state', row.new_zeros(value_heads, dk, dv)) * g.exp()[:, None, None]
        wrong = v.view(value_heads, dv) - torch.einsum('hk,hkv->hv', k, state)
        state = state + torch.einsum('hk,hv->hkv', k, wrong * torch.sigmoid(b)[:, None])
        memory['state'] = state
        read = torch.einsum('hk,hkv->hv', q, state) / dk**0.5
        gated = self.rms(read) * self.weights[f'{name}.norm.weight'] * F.silu(z.view(value_heads, dv))
        return self.times(gated.flatten(), f'{name}.out_proj')

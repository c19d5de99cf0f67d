"""The kernels of a decode step by their references, in any dtype and on any device; they note their calls."""

from qerl.engine.decode.linears import TorchLinears
from qerl.kernels.attention import decode_attention
from qerl.kernels.attention.attention_options import PLAIN
from qerl.kernels.tiles import lora_shrink


class ReferenceShrink:
    """LoraShrink by its reference."""

    def __init__(self, compute, calls):
        self.compute, self.calls = compute, calls

    def embed(self, tokens_B, table_VD):
        self.calls.append("embed")
        return table_VD[tokens_B.long()].float()

    def norm(self, h_MD, weight_D, noise, eps, *, rows_M=None):
        self.calls.append("norm")
        if rows_M is not None:
            noise = noise[rows_M.long()]
        return self._rounded(lora_shrink.reference(h_MD, weight_D, noise, eps, weight_D[None], 1.0)[0])

    def norm_shrink(self, h_MD, weight_D, noise, eps, a_RD, scaling, *, rows_M=None, out=None):
        x_MD = self.norm(h_MD, weight_D, noise, eps, rows_M=rows_M)
        self.calls[-1] = "norm_shrink"
        u_MR = self._rounded(scaling * x_MD.double() @ a_RD.double().T)
        return (x_MD, u_MR) if out is None else (out[0].copy_(x_MD), out[1].copy_(u_MR))

    def shrink(self, x_MK, a_RK, scaling, *, out=None, copy=None):
        self.calls.append("shrink")
        if copy is not None:
            copy.copy_(x_MK)
        u_MR = self._rounded(scaling * x_MK.double() @ a_RK.double().T)
        return u_MR if out is None else out.copy_(u_MR)

    def _rounded(self, x):
        return x.to(self.compute)


class ReferenceLinears(TorchLinears):
    """TorchLinears, which note their calls."""

    def __init__(self, calls, room=0):
        super().__init__(room)
        self.calls = calls

    def linear(self, x_BK, group, u_BR, residual_BN):
        self.calls.append("linear" if residual_BN is None else "linear onto")
        return super().linear(x_BK, group, u_BR, residual_BN)

    def swiglu(self, x_BK, group, u_BR, activation="silu"):
        y_BF = super().swiglu(x_BK, group, u_BR, activation)
        self.calls[-1] = "swiglu"
        return y_BF


class ReferenceAttention:
    """DecodeAttention by its reference."""

    def __init__(self, calls, *, is_gated=False, is_interleaved=False, **shape):
        self.calls, self.flags, self.shape = calls, (is_gated, is_interleaved), shape

    def attend(self, qkv_BX, angles, cache, state, norms=None, options=PLAIN):
        self.calls.append("attend")
        o_BX = decode_attention.reference(qkv_BX, angles, cache, state, norms, options, *self.flags)
        return o_BX.to(qkv_BX.dtype)

    def attend_together(self, *rest, **options):
        raise NotImplementedError

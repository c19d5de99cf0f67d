"""The kernels of a decode step by their references, in any dtype and on any device; they note their calls."""

from qerl.engine.decode.linears import TorchLinears
from qerl.kernels.attention import decode_attention
from qerl.kernels.attention.attention_options import PLAIN
from qerl.kernels.tiles import lora_shrink, row_slots
from qerl.kernels.tiles.nvfp4_decode import swiglu_order


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

    def norm_shrink(self, h_MD, weight_D, noise, eps, a_RD, scaling, *, rows_M=None, out=None, slots=None):
        x_MD = self.norm(h_MD, weight_D, noise, eps, rows_M=rows_M)
        self.calls[-1] = "norm_shrink"
        u_MR = self._hidden(x_MD, a_RD, scaling, slots)
        return (x_MD, u_MR) if out is None else (out[0].copy_(x_MD), out[1].copy_(u_MR))

    def shrink(self, x_MK, a_RK, scaling, *, out=None, copy=None, slots=None):
        self.calls.append("shrink")
        if copy is not None:
            copy.copy_(x_MK)
        u_MR = self._hidden(x_MK, a_RK, scaling, slots)
        return u_MR if out is None else out.copy_(u_MR)

    def _hidden(self, x_MK, a_RK, scaling, slots):
        assert a_RK.shape[-2] % 16 == 0 and a_RK.shape[-2] <= lora_shrink.MAX_ROWS
        if slots is None:
            return self._rounded(scaling * x_MK.double() @ a_RK.double().T)
        return self._rounded(row_slots.hidden(x_MK, a_RK, slots))

    def _rounded(self, x):
        return x.to(self.compute)


class ReferenceLinears(TorchLinears):
    """TorchLinears, which note their calls."""

    def __init__(self, calls, room=0):
        super().__init__(room)
        self.calls = calls

    def linear(self, x_BK, group, u_BR, residual_BN, numbers_B=None):
        self.calls.append("linear" if residual_BN is None else "linear onto")
        if numbers_B is None:
            return super().linear(x_BK, group, u_BR, residual_BN)
        adapter, y_BN = (
            group.adapter(u_BR, numbers_B=numbers_B),
            super().linear(x_BK, group, None, residual_BN),
        )
        b_SNR, starts = adapter.b, adapter.starts
        if group.is_interleaved:  # back from the order of the packed rows
            features = group.ends[0]
            b_SNR, starts = b_SNR.new_empty(b_SNR.shape), (features,)
            b_SNR[:, swiglu_order(features, b_SNR.device)] = adapter.b
        return y_BN.add_(row_slots.expand(u_BR, b_SNR, adapter.slots, starts))

    def swiglu(self, x_BK, group, u_BR, activation="silu", numbers_B=None):
        y_BF = super().swiglu(x_BK, group, u_BR, activation, numbers_B)
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

    def set_chunk(self, state, lengths_B, num_rows):
        pass

    def attend_together(self, *rest, **options):
        raise NotImplementedError

// o = softmax(q k^T / sqrt(H)) v of one token a row over a paged cache, its rotary embedding and cache write included.
//
// The work is cut into units: (row, chunk of CHUNK positions, K/V head). Every CTA lists all units by the rows' lengths
// and takes each gridDim.x-th. It copies the unit's keys and values to shared memory (cp.async, 16-byte pieces swizzled
// for ldmatrix) and starts on the next unit's as soon as a buffer is free. Warps first share the positions, then H:
//
//   s^T [CHUNK, heads] = k [CHUNK, H] q^T          a warp has CHUNK / 4 positions; heads padded to 8 or 16
//   o^T [H, heads]     = v^T [H, CHUNK] p^T        a warp has H / 4 of H; p goes through shared memory
//
// Heads are the columns of mma's second operand, so a unit serves its K/V head's query heads, or those of several rows
// that share it, from one reading of k and v, and no column's sums depend on which others there are.
//
// FP8: bits (sign, exponent, mantissa) of E4M3 put into a bfloat16 are worth x * 2^-120. q and p carry 2^100, the sums 2^20.
//
// Compile-time: H head size, GROUP query heads of a K/V head, KV_HEADS, PAGE positions of a page, CHUNK, FP8, MAX_ROWS,
// CTAS on a multiprocessor.
template <int TILES>
__device__ __forceinline__ void score(const Parameters& p, const Shared& s, const Unit& u, float (&x)[PT][TILES][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, padded = u.padded();
  const int length = u.tokens + (u.fresh >= 0);
#pragma unroll
  for (int i = 0; i < PT; i++) {
    const int first = warp * (CHUNK / 4) + i * 16;
#pragma unroll
    for (int n = 0; n < TILES; n++) x[i][n][0] = x[i][n][1] = x[i][n][2] = x[i][n][3] = 0.f;
    if (first < padded) {
      u32 w[H / 16][4];  // all loads first: their latency is met once
#pragma unroll
      for (int k = 0; k < ROW_BYTES / 32; k++) load4(w[k], smem_u32(s.k) + place<ROW_BYTES>(first + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int k = 0; k < H / 16; k++) {
#if FP8
        const u32 top = w[k / 2][k % 2 * 2], bottom = w[k / 2][k % 2 * 2 + 1];
        const u32 a[4] = {even_pair(top), even_pair(bottom), odd_pair(top), odd_pair(bottom)};
#else
        const u32(&a)[4] = w[k];
#endif
#pragma unroll
        for (int n = 0; n < TILES; n++)
          mma(x[i][n], a, *(const u32*)(s.qp + place<2 * H>(n * 8 + g, 2 * k) + t * 4), *(const u32*)(s.qp + place<2 * H>(n * 8 + g, 2 * k + 1) + t * 4));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = first + half * 8 + g;
      float factor = p.score_factor * SUM_FACTOR;
#if FP8
      factor *= s.k_scales[at];
#endif
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; j++) x[i][n][j] = at < length ? x[i][n][j] * factor : -__int_as_float(0x7F800000);
    }
  }
}

// Each warp's largest score of every column to shared memory.
template <int TILES>
__device__ __forceinline__ void put_maxima(Shared& s, const float (&x)[PT][TILES][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    float a = x[0][n][0], b = x[0][n][1];
#pragma unroll
    for (int i = 0; i < PT; i++) a = fmaxf(a, fmaxf(x[i][n][0], x[i][n][2])), b = fmaxf(b, fmaxf(x[i][n][1], x[i][n][3]));
#pragma unroll
    for (int i = 4; i < 32; i *= 2) a = fmaxf(a, __shfl_xor_sync(FULL, a, i)), b = fmaxf(b, __shfl_xor_sync(FULL, b, i));
    if (lane < 4) *(float2*)&s.maxima[warp][n * 8 + 2 * lane] = make_float2(a, b);
  }
}

__device__ __forceinline__ float2 largest(const Shared& s, int column) {
  float2 m = *(const float2*)&s.maxima[0][column];
#pragma unroll
  for (int w = 1; w < 4; w++) {
    const float2 other = *(const float2*)&s.maxima[w][column];
    m.x = fmaxf(m.x, other.x), m.y = fmaxf(m.y, other.y);
  }
  return m;
}

// p^T in the place of q, and each warp's sum of every column.
template <int TILES>
__device__ __forceinline__ void put_weights(Shared& s, float (&x)[PT][TILES][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const float2 m = largest(s, n * 8 + 2 * t);
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int i = 0; i < PT; i++) {
      const int first = warp * (CHUNK / 4) + i * 16;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float v = exp2_fast(x[i][n][2 * half] - m.x), w = exp2_fast(x[i][n][2 * half + 1] - m.y);
        a += v, b += w;
#if FP8
        const float factor = s.v_scales[first + half * 8 + g] * Q_FACTOR;
        v *= factor, w *= factor;
#endif
        *(u32*)(s.qp + place<2 * CHUNK>(n * 8 + g, first / 8 + half) + t * 4) = transpose8x8(pack2(v, w));
      }
    }
#pragma unroll
    for (int i = 4; i < 32; i *= 2) a += __shfl_xor_sync(FULL, a, i), b += __shfl_xor_sync(FULL, b, i);
    if (lane < 4) *(float2*)&s.sums[warp][n * 8 + 2 * lane] = make_float2(a, b);
  }
}

template <int TILES>
__device__ __forceinline__ void weigh(const Shared& s, const Unit& u, float (&o)[OT][TILES][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, padded = u.padded();
#pragma unroll
  for (int i = 0; i < OT; i++)
#pragma unroll
    for (int n = 0; n < TILES; n++) o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0.f;
#pragma unroll
  for (int k0 = 0; k0 < CHUNK / 16; k0 += 4) {
    if (k0 * 16 >= padded) break;
    u32 w[4][FP8 ? 1 : OT][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = min((k0 + j) * 16, padded - 16);  // past the end what has arrived is read again and not used
#if FP8
      load4_transposed(w[j][0], smem_u32(s.v) + place<ROW_BYTES>(at + lane % 16, warp * OT + (OT == 2 ? lane / 16 : 0)));
#else
#pragma unroll
      for (int i = 0; i < OT; i++) load4_transposed(w[j][i], smem_u32(s.v) + place<ROW_BYTES>(at + lane / 16 * 8 + lane % 8, (warp * OT + i) * 2 + lane / 8 % 2));
#endif
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int k = k0 + j;
      if (k * 16 >= padded) break;
      u32 a[OT][4];
#pragma unroll
      for (int i = 0; i < OT; i++) {
#if FP8  // a column of pairs of bytes becomes rows g (even H) and g + 8 (odd H)
        const u32 early = w[j][0][2 * i], late = w[j][0][2 * i + 1];
        a[i][0] = even_pair(early), a[i][1] = odd_pair(early), a[i][2] = even_pair(late), a[i][3] = odd_pair(late);
#else
        for (int e = 0; e < 4; e++) a[i][e] = w[j][i][e];
#endif
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const u32 b0 = *(const u32*)(s.qp + place<2 * CHUNK>(n * 8 + g, 2 * k) + t * 4), b1 = *(const u32*)(s.qp + place<2 * CHUNK>(n * 8 + g, 2 * k + 1) + t * 4);
#pragma unroll
        for (int i = 0; i < OT; i++) mma(o[i][n], a[i], b0, b1);
      }
    }
  }
}

__device__ __forceinline__ float2 total(const Shared& s, int column) {
  float2 sum = *(const float2*)&s.sums[0][column];
#pragma unroll
  for (int w = 1; w < 4; w++) sum.x += s.sums[w][column], sum.y += s.sums[w][column + 1];
  return sum;
}

// The warp's part of H of one row's heads of this K/V head: o / sum in bfloat16.
__device__ __forceinline__ void put_output(const Parameters& p, const Unit& u, const float (&o)[OT][NT][4], const float2 (&sums)[NT]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  u16* to = p.out + ((size_t)u.row * KV_HEADS + u.head) * GROUP * H;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float a = SUM_FACTOR / sums[n].x, b = SUM_FACTOR / sums[n].y;
#pragma unroll
    for (int i = 0; i < OT; i++) {
      const float* v = o[i][n];
      const int at = (threadIdx.x / 32 * OT + i) * 16;
#if FP8  // rows g and g + 8 are neighbours in H
      if (n * 8 + 2 * t < GROUP) *(u32*)(to + (n * 8 + 2 * t) * H + at + 2 * g) = pack2(v[0] * a, v[2] * a);
      if (n * 8 + 2 * t + 1 < GROUP) *(u32*)(to + (n * 8 + 2 * t + 1) * H + at + 2 * g) = pack2(v[1] * b, v[3] * b);
#else
      const u32 top = transpose8x8(pack2(v[0] * a, v[1] * b)), bottom = transpose8x8(pack2(v[2] * a, v[3] * b));
      if (n * 8 + g < GROUP) *(u32*)(to + (n * 8 + g) * H + at + 2 * t) = top, *(u32*)(to + (n * 8 + g) * H + at + 8 + 2 * t) = bottom;
#endif
    }
  }
}

// A chunk's result for one row, whose columns are tiles NT member to NT (member + 1), to the workspace.
template <int TILES>
__device__ __forceinline__ void put_partial(const Parameters& p, const Shared& s, const Unit& u, int member, int row, const float (&o)[OT][TILES][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const size_t at = ((size_t)row * KV_HEADS + u.head) * p.max_chunks + u.chunk;
  u32* to = p.partials + at * (8 * NT * H) + warp * (OT * NT * 128) + lane * 4;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n * 8 + 2 * t >= GROUP) continue;
#pragma unroll
    for (int i = 0; i < OT; i++) {
      const float* v = o[i][member * NT + n];
      store_partial(to + (i * NT + n) * 128, bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3]));
    }
    if (warp == n && lane < 4) {
      const float2 m = largest(s, (member * NT + n) * 8 + 2 * t), sum = total(s, (member * NT + n) * 8 + 2 * t);
      store_partial(p.maxima + at * (16 * NT) + n * 16 + 4 * t, bits(m.x), bits(sum.x), bits(m.y), bits(sum.y));
    }
  }
}

// The unit of a row's last chunk waits for the others and adds all in their order. It waits only for units of a lower
// index: those of an earlier turn, or of a CTA that started earlier.
__device__ __forceinline__ void add_chunks(const Parameters& p, const Shared& s, const Unit& u, float (&o)[OT][NT][4], float2 (&sums)[NT]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, others = u.chunk;
  const size_t first = ((size_t)u.row * KV_HEADS + u.head) * p.max_chunks;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n * 8 + 2 * t >= GROUP) continue;
    u32* maxima = p.maxima + first * (16 * NT) + n * 16 + 4 * t;
    u32* partials = p.partials + first * (8 * NT * H) + warp * (OT * NT * 128) + n * 128 + lane * 4;
    const float2 own = largest(s, n * 8 + 2 * t);
    float2 m = own, sum = make_float2(0.f, 0.f);
    float acc[OT][4] = {};
    for (int c0 = 0; c0 < others; c0 += 8) {
      u32 x[8][4];
#pragma unroll
      for (int j = 0; j < 8; j++) load_partial(maxima + min(c0 + j, others - 1) * (16 * NT), x[j]);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        await_partial(maxima + min(c0 + j, others - 1) * (16 * NT), x[j]);
        m.x = fmaxf(m.x, __uint_as_float(x[j][0])), m.y = fmaxf(m.y, __uint_as_float(x[j][2]));
      }
    }
    for (int c0 = 0; c0 < others; c0 += 4) {
      u32 x[4][4], v[4][OT][4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int c = min(c0 + j, others - 1);
        load_partial(maxima + c * (16 * NT), x[j]);
#pragma unroll
        for (int i = 0; i < OT; i++) load_partial(partials + (size_t)c * (8 * NT * H) + i * (NT * 128), v[j][i]);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (c0 + j >= others) break;
        const float a = exp2_fast(__uint_as_float(x[j][0]) - m.x), b = exp2_fast(__uint_as_float(x[j][2]) - m.y);
        sum.x = fmaf(a, __uint_as_float(x[j][1]), sum.x), sum.y = fmaf(b, __uint_as_float(x[j][3]), sum.y);
#pragma unroll
        for (int i = 0; i < OT; i++) {
          u32* at = partials + (size_t)(c0 + j) * (8 * NT * H) + i * (NT * 128);
          await_partial(at, v[j][i]);
          store_partial(at, EMPTY, EMPTY, EMPTY, EMPTY);
#pragma unroll
          for (int e = 0; e < 4; e++) acc[i][e] = fmaf(e % 2 ? b : a, __uint_as_float(v[j][i][e]), acc[i][e]);
        }
      }
    }
    const float a = exp2_fast(own.x - m.x), b = exp2_fast(own.y - m.y);
    sums[n].x = fmaf(a, sums[n].x, sum.x), sums[n].y = fmaf(b, sums[n].y, sum.y);
#pragma unroll
    for (int i = 0; i < OT; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[i][n][e] = fmaf(e % 2 ? b : a, o[i][n][e], acc[i][e]);
  }
  __syncthreads();  // every warp has read the maxima
  for (int i = threadIdx.x; i < others * NT * 4; i += THREADS) store_partial(p.maxima + first * (16 * NT) + i * 4, EMPTY, EMPTY, EMPTY, EMPTY);
}

struct Maps {
  const TensorMap *k, *v;
};

// Unit number `turn` of this CTA for `count` (at most ROWS) of its rows, whose queries are in place. Its last call starts
// on the next unit as its buffers become free.
template <int ROWS>
__device__ __forceinline__ void attend(const Parameters& p, const Maps& maps, Shared& s, int turn, bool has_next, int begin, int count, bool is_last, Own& own) {
  const Unit &u = s.units[turn % 4], &next = s.units[(turn + 1) % 4];
  wait(smem_u32(&s.k_full), turn & 1);
  if (u.fresh >= 0) {
    wait(smem_u32(&s.v_full), turn & 1);
    put_fresh_token(p, s, u, own);
  }
  __syncthreads();
  // every second turn two warps find the units of the two turns after the next
  if (turn % 2 == 0 && turn && begin == 0 && threadIdx.x >= 64) find_unit(p, s, turn + threadIdx.x / 32);
  float x[PT][ROWS * NT][4], o[OT][ROWS * NT][4];
  score(p, s, u, x);
  put_maxima(s, x);
  __syncthreads();
  if (is_last && has_next) fetch(next, s.k, p.k, maps.k, smem_u32(&s.k_full));
  put_weights(s, x);
  wait(smem_u32(&s.v_full), turn & 1);
  __syncthreads();
  if (ROWS == 1 && has_next) own = load_own(p, next);
  weigh(s, u, o);
  float2 sums[NT];
  if (u.fresh >= 0) {
#pragma unroll
    for (int n = 0; n < NT; n++) sums[n] = total(s, n * 8 + 2 * (threadIdx.x % 4));
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (i < count) put_partial(p, s, u, i, u.shared ? s.members[begin + i] : u.row, o);
  }
  __syncthreads();
  if (is_last && has_next) fetch(next, s.v, p.v, maps.v, smem_u32(&s.v_full));
  if constexpr (ROWS == 1) {
    if (u.fresh < 0) return;
    if (u.chunk) add_chunks(p, s, u, o, sums);
    put_output(p, u, o, sums);
  }
}

// The rows in use with this leader, ascending.
__device__ __forceinline__ void list_members(const Parameters& p, Shared& s, int leader) {
  const int lane = threadIdx.x % 32;
  __syncthreads();  // the list before this one may still be read
  if (threadIdx.x < 32) {
    int count = 0;
#pragma unroll 4
    for (int row0 = 0; row0 < p.rows; row0 += 32) {
      const int row = row0 + lane;
      const bool is_member = row < p.rows && p.leaders[row] == leader && p.positions[row] >= 0;
      const u32 found = __ballot_sync(FULL, is_member);
      if (is_member) s.members[count + __popc(found & ((1u << lane) - 1))] = row;
      count += __popc(found);
    }
    if (lane == 0) s.num_members = count;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
decode_attention(const __grid_constant__ Parameters p, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) u8 raw[];
  static_assert(sizeof(Shared) <= SHARED_BYTES, "decode_attention.py allots too little");
  Shared& s = *(Shared*)raw;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if (threadIdx.x == 0) {
    if (smem_u32(raw) % 1024) __trap();
    init(smem_u32(&s.k_full), TMA ? 1 : THREADS), init(smem_u32(&s.v_full), TMA ? 1 : THREADS);
#if TMA
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
#if TMA
  if (threadIdx.x < 2) asm volatile("prefetch.tensormap [%0];" ::"l"(threadIdx.x ? &v_map : &k_map) : "memory");
#endif
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  list_units(p, s);
  find_unit(p, s, threadIdx.x / 32);
  __syncthreads();
  const Maps maps{&k_map, &v_map};
  const int units = s.ends[p.rows - 1] * KV_HEADS;
  Own own;
  if (blockIdx.x < units) {
    own = load_own(p, s.units[0]);
    fetch(s.units[0], s.k, p.k, maps.k, smem_u32(&s.k_full));
    fetch(s.units[0], s.v, p.v, maps.v, smem_u32(&s.v_full));
  }
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
    if (p.positions[row] < 0)
      for (int i = threadIdx.x; i < GROUP * KV_HEADS * H / 2; i += THREADS) ((u32*)p.out)[row * (GROUP * KV_HEADS * H / 2) + i] = 0;
  for (int turn = 0; blockIdx.x + turn * gridDim.x < units; turn++) {
    const Unit& u = s.units[turn % 4];
    const bool has_next = blockIdx.x + (turn + 1) * gridDim.x < units;
    put_own(p, s, u, own);
    if (!u.shared) {
      attend<1>(p, maps, s, turn, has_next, 0, 1, true, own);
    } else {
      list_members(p, s, u.row);
      const int count = s.num_members;
      for (int begin = 0; begin == 0 || begin < count; begin += MEMBERS) {
        const int some = min(MEMBERS, count - begin);
        put_members(p, s, u, begin, some);
        attend<MEMBERS>(p, maps, s, turn, has_next, begin, some, begin + MEMBERS >= count, own);
      }
      if (has_next) own = load_own(p, s.units[(turn + 1) % 4]);
    }
  }
}

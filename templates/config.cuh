// Types, sizes and flags of this variant: the only partial that Jinja fills in.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// fp16 and bf16 values travel as raw bits; ptx.cuh converts them.
using Element = uint16;

// clang-format off
#define KERNEL_NAME ${name}
// clang-format on

enum class DType { fp16, bf16, fp32 };
enum class MaskKind { full, causal, window };
enum class RotaryKind { none, interleaved, halves };

constexpr DType kDType = DType::${dtype};
constexpr int kThreads = ${threads};
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kElementBytes = 2;

//% if kernel == "combine"
constexpr DType kPartial = DType::${partial};
constexpr int kWarps = ${warps};
constexpr int kVector = ${vector};  // columns that a lane loads at once
constexpr int kMaxSplits = ${max_splits};
constexpr int kMaxHeadDim = ${max_head_dim};
//% endif

//% if kernel == "append"
constexpr RotaryKind kRotary = RotaryKind::${rotary};
//% endif

//% if kernel == "forward"
constexpr int kIsa = ${isa};  // 75: synchronous copies, m16n8k8; 80: cp.async, m16n8k16; 90: TMA,
                              // wgmma
constexpr int kHeadDim = ${head_dim};
constexpr int kHeadDimV = ${head_dim_v};
constexpr int kHeadDimPadded = ${head_dim_padded};     // columns of a shared row of Q and K
constexpr int kHeadDimVPadded = ${head_dim_v_padded};  // columns of a shared row of V and O

constexpr int kBlockM = ${block_m};  // query rows of a CTA
constexpr int kBlockN = ${block_n};  // keys of a tile
constexpr int kWarps = ${warps};
constexpr int kKeyWarps = ${key_warps};  // warps that share the rows and split the keys of a tile
constexpr int kStages = ${stages};
constexpr int kBlocksPerSm = ${blocks_per_sm};
constexpr bool kQInRegisters = ${q_in_regs};

constexpr MaskKind kMask = MaskKind::${mask};
constexpr bool kSoftcap = ${softcap};
constexpr bool kAlibi = ${alibi};
constexpr bool kPrescale = ${prescale};  // scores are scaled before the maximum is taken
constexpr bool kEvenM = ${even_m};       // seqlen_q % kBlockM == 0
constexpr bool kEvenN = ${even_n};       // seqlen_k % kBlockN == 0

constexpr bool kPackGqa = ${pack_gqa};  // row = position * group + head in the group
constexpr bool kSplit = ${split};    // the result is partial: fp32, and normalised by its own sum
constexpr bool kRagged = ${ragged};  // lengths and places of sequences come from device arrays
constexpr bool kPaged = ${paged};    // keys and values are found by a block table
constexpr RotaryKind kRotary = RotaryKind::${rotary};  // of q
constexpr bool kGather = ${gather};  // isa 90: rows are copied one by one, which TMA cannot read

constexpr int kLoadBytes = ${align};       // widest global load that q, k and v allow
constexpr int kStoreBytes = ${out_align};  // widest global store that o allows

// mma tiles: 16 query rows, 8 keys (or columns of V) wide, 16 deep. ldmatrix.x4 feeds two tiles at
// once.
constexpr int kRowWarps = kWarps / kKeyWarps;
constexpr int kWarpKeys = kBlockN / kKeyWarps;     // keys of a tile that a warp multiplies
constexpr int kMmaM = kBlockM / (kRowWarps * 16);  // m16 tiles of a warp
constexpr int kMmaN = kWarpKeys / 8;               // n8 tiles of S
constexpr int kMmaK = (kHeadDim + 15) / 16;        // k16 steps of Q K^T
constexpr int kMmaV = (kHeadDimV + 15) / 16 * 2;   // n8 tiles of O
constexpr int kRows = 2 * kMmaM;  // rows of S and O that a thread shares with its quad

// Steps of Q K^T in one piece of straight code. With two m16 tiles a warp, all of a wide head in
// one piece would let the compiler load so many fragments ahead that it spills (NVRTC 13.0
// and 13.5, head_dim 128); with one, pieces cost 3 % (H200, head_dim 256). Q's fragments in
// registers need constant indices.
constexpr int kQueryKeyUnroll = kQInRegisters || kMmaM == 1 || kMmaK < 8 ? kMmaK : 4;

//% if isa == 90
// Warpgroups: the first loads, the others multiply, 64 query rows each.
constexpr int kWarpgroupThreads = 128;
constexpr int kConsumers = kWarps / 4;
constexpr int kQueryStages = ${q_stages};  // buffers of Q
constexpr int kSharedBytes = ${shared_bytes};
static_assert(kThreads == (kConsumers + 1) * kWarpgroupThreads, "one warpgroup more, to load");

// Registers and operands of the two products of a key tile, see sm90/ptx.cuh.
// clang-format off
#define WGMMA_TYPES "${wgmma_types}"
#define SCORE_SHAPE "${score_shape}"
#define SCORE_REGISTERS "${score_registers}"
#define SCORE_ACCUMULATOR(d) ${score_accumulator}
#define SCORE_STEPS(STEP) ${score_steps}
#define SCORE_OPERANDS(a, b) ${score_operands}
#define OUTPUT_SHAPE "${output_shape}"
#define OUTPUT_REGISTERS "${output_registers}"
#define OUTPUT_ACCUMULATOR(d) ${output_accumulator}
#define OUTPUT_STEPS(STEP) ${output_steps}
#define OUTPUT_OPERANDS(a, b) ${output_operands}
// clang-format on
//% endif

static_assert(kBlockM % (kRowWarps * 16) == 0, "each warp owns whole m16 tiles");
static_assert(kWarpKeys % 16 == 0, "P V takes 16 keys a step");
static_assert(kIsa >= 80 || kDType == DType::fp16, "m16n8k8 takes fp16 only");
static_assert(kKeyWarps == 1 || kMmaM == 1, "warps that split the keys share one m16 tile");

// What the kernel writes.
//% if split
using Output = float;
//% else
using Output = Element;
//% endif
//% endif

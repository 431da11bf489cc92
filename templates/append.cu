// Writes new keys, rotated, and new values into a cache: one CTA for each new key and head.
//
// New key i of a sequence goes to slot cached + i, where `cached` slots are in use, and is rotated
// to the position of that number. What would lie past the cache or in no page is not written.
#include "pages.cuh"
#include "rotary.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL_NAME(const __grid_constant__ Params params) {
  const int head = block_index() % params.heads;
  const int token = block_index() / params.heads;
  const int batch = token / params.seqlen_new;
  const int i = token - batch * params.seqlen_new;
  const Sequences& given = params.sequences;
  const int cached = given.seqused_k != nullptr
                         ? static_cast<int>(load_global_4(given.seqused_k + batch))
                         : params.seqlen_k - params.seqlen_new;
  const int slot = cached + i;
  if (cached < 0 || slot < 0 || slot >= params.slots) return;

  int64 k_offset = head * params.k_strides.head;
  int64 v_offset = head * params.v_strides.head;
  if (given.block_table != nullptr) {
    const Pages pages(params, batch);
    const int page = pages.page_of(slot);
    if (!pages.exists(page)) return;
    k_offset += pages.row_offset(page, slot, params.k_strides);
    v_offset += pages.row_offset(page, slot, params.v_strides);
  } else {
    int row = batch;
    if (given.cache_batch_idx != nullptr) {
      row = static_cast<int>(load_global_4(given.cache_batch_idx + batch));
      if (static_cast<uint32>(row) >= static_cast<uint32>(params.k_batch)) return;
    }
    k_offset += row * params.k_strides.batch + slot * params.k_strides.row;
    v_offset += row * params.v_strides.batch + slot * params.v_strides.row;
  }

  const Strides& k_new = params.k_new_strides;
  const Element* k_gmem = params.k_new + batch * k_new.batch + i * k_new.row + head * k_new.head;
  const Strides& v_new = params.v_new_strides;
  const Element* v_gmem = params.v_new + batch * v_new.batch + i * v_new.row + head * v_new.head;
  for (int column = thread_index(); column < params.head_dim; column += kThreads) {
    Element value = load_global_2(k_gmem + column);
    if constexpr (kRotary != RotaryKind::none) {
      // Columns that are not rotated keep their bits.
      if (column < 2 * params.rotary_half) {
        const Rotary rotary(params, slot);
        value = static_cast<Element>(pack_elements(rotary.rotated(k_gmem, column), 0.f));
      }
    }
    store_global_2(params.k + k_offset + column, value);
  }
  for (int column = thread_index(); column < params.head_dim_v; column += kThreads) {
    store_global_2(params.v + v_offset + column, load_global_2(v_gmem + column));
  }
}

// Where a slot of a cache lies.
#pragma once

#include "divide.cuh"

struct Pages {
  const int* table_gmem;  // the sequence's row of the block table
  Divisor page_size;
  int pages;

  __device__ __forceinline__ Pages(const Params& params, int batch)
      : table_gmem(params.sequences.block_table + batch * params.table_stride),
        page_size(params.page_size),
        pages(params.pages) {}

  /// The page of a slot.
  __device__ __forceinline__ int page_of(int slot) const {
    return static_cast<int>(load_global_4(table_gmem + divide(slot, page_size)));
  }

  /// The row of a slot in its page.
  __device__ __forceinline__ int row_of(int slot) const {
    return slot - divide(slot, page_size) * page_size.value;
  }

  /// Whether a table's entry names a page. Others are neither read nor written.
  __device__ __forceinline__ bool exists(int page) const {
    return static_cast<uint32>(page) < static_cast<uint32>(pages);
  }

  /// Element offset, in a tensor of these strides, of a slot in its page.
  __device__ __forceinline__ int64 row_offset(int page, int slot, const Strides& strides) const {
    return page * strides.batch + row_of(slot) * strides.row;
  }
};

// The native module, with the operations of the CPU. Shapes and dtypes are checked here in addition to the checks in
// ops.py. The GIL is not held while a step runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "bindings/cuda.h"
#include "ops/attention.h"
#include "ops/dequantize.h"
#include "ops/matmul.h"
#include "ops/packing.h"
#include "ops/program.h"
#include "ops/rope_table.h"
#include "ops/rows.h"
#include "packed_weights.h"
#include "runtime/bus_error.h"
#include "runtime/cpu_features.h"
#include "runtime/dispatch.h"
#include "runtime/roofline.h"
#include "runtime/threads.h"

namespace nb = nanobind;
using namespace qtensor;

namespace {

template <class T, size_t N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Arrays are never converted, because a result written to a converted copy of an output would be lost.
auto exact(const char* name) { return nb::arg(name).noconvert(); }

template <class... Arguments>
void require_aligned(const nb::ndarray<Arguments...>& array) {
  const auto size = uintptr_t(array.itemsize());
  require(reinterpret_cast<uintptr_t>(array.data()) % size == 0, "an array is not aligned to its item size");
}
template <class Array>
void require_aligned(const std::optional<Array>& array) {
  if (array) require_aligned(*array);
}
template <class Array>
void require_aligned(const std::vector<Array>& arrays) {
  for (const auto& array : arrays) require_aligned(array);
}
template <class A, class B>
void require_same_shape(const A& a, const B& b) {
  bool same = a.ndim() == b.ndim();
  for (size_t i = 0; same && i < a.ndim(); i++) same = a.shape(i) == b.shape(i);
  require(same, "shapes differ");
}

// A program and the arrays to which its steps point.
struct Recording {
  Program program;
  nb::list kept;
};
thread_local Recording* recording = nullptr;

template <class... Kept>
void emit(Step step, const Kept&... kept) {
  (require_aligned(kept), ...);
  if (recording != nullptr) {
    recording->program.add(std::move(step));
    (recording->kept.append(nb::cast(kept)), ...);
    return;
  }
  const nb::gil_scoped_release released;
  const std::lock_guard<std::mutex> lock(engine_mutex());
  step(thread_pool());
}

template <class Array>
Weight weight_of(const Array& data, int format, int64_t rows, int64_t k, int64_t slab_stride = 0) {
  require(rows > 0 && k > 0 && rows < (int64_t(1) << 40) / k, "a weight needs rows and columns");
  const auto f = static_cast<Format>(format);
  const bool plain = f == Format::F32 || f == Format::F16 || f == Format::BF16;
  const bool by_32 = has_blocks_of_32(f) && slab_stride == 0;
  require(plain || k % (by_32 ? kSubBlock : kSuperBlock) == 0, "the row length is not a multiple of the block size");
  const Weight w{f, data.data(), rows, k, slab_stride};
  if (slab_stride == 0) {
    require(int64_t(data.size()) == rows * bytes_per_row(f, k), "the weight's bytes do not match its shape");
  } else {
    require(slab_stride >= slab_bytes(f, k, kSlabRows) && slab_stride < (int64_t(1) << 40) / rows,
            "slab_stride is too small for a slab, or too large");
    require(int64_t(data.size()) == packed_bytes(w), "the weight's slabs do not match its shape");
  }
  return w;
}

KeyValuePool pool_of(const Out<uint8_t, 4>& data, int format, int64_t kv_heads, int64_t dim) {
  require(format >= 0 && format < kCacheFormats, "unknown cache format");
  const int64_t run = int64_t(data.shape(2));
  const KeyValuePool pool{data.data(), int64_t(data.shape(0)) * run,    run, kv_heads,
                          dim,         static_cast<CacheFormat>(format)};
  require(dim % 16 == 0 && dim > 0 && dim <= kMostByteDim, "the head dimension must be a multiple of 16, up to 1024");
  require(pool.blocks > 0 && kv_heads > 0, "a cache needs blocks and heads");
  require(int64_t(data.shape(1)) == kv_heads && int64_t(data.shape(3)) == head_bytes(pool.format, dim),
          "the size of a block does not match its format");
  require(reinterpret_cast<uintptr_t>(data.data()) % 64 == 0, "the cache must begin at a cache line");
  return pool;
}

WindowTiles window_of(const KeyValuePool& pool, const std::optional<In<int32_t, 2>>& tables,
                      const std::optional<Out<uint8_t, 4>>& data, const RowPlaces& places) {
  const bool small = pool.format > CacheFormat::k8v8;
  require(tables.has_value() == small && data.has_value() == small,
          "window tiles are required for formats below 8 bits, and not allowed for others");
  if (!small) return {};
  require(int64_t(tables->shape(0)) == places.table_count && int64_t(tables->shape(1)) == places.table_length,
          "the tables of window tiles must have the same shape as the other tables");
  return {tables->data(), pool_of(*data, int(CacheFormat::k8v8), pool.kv_heads, pool.dim)};
}

RowPlaces places_of(const In<int32_t, 1>& positions, const In<int32_t, 1>& sequences, const In<int32_t, 2>& tables) {
  require(positions.size() == sequences.size(), "positions and sequences differ in length");
  return {positions.data(),          sequences.data(),         tables.data(),
          int64_t(positions.size()), int64_t(tables.shape(0)), int64_t(tables.shape(1))};
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // programs that exist until the interpreter ends are not leaks
  m.doc() = "Kernels for quantized tensors. Use the ops of the backend, which report errors in more detail.";

  bind_cuda(m);
  m.def(
      "cpu_features", [] { return detect_cpu_features().names(); },
      "Return the instruction sets that the CPU and the operating system support.");
  m.def("known_kernels", &known_kernels, "Return the kernel families in this build, best first.");
  m.def("available_kernels", &available_kernels, "Return the kernel families that this CPU supports, best first.");
  m.def("kernels", [] { return std::string(kernels().name); }, "Return the current kernel family.");
  m.def("use_kernels", &use_kernels, nb::arg("name"),
        "Select a kernel family. Raises ValueError, which lists the choices.");
  m.def("use_attention", &use_attention, nb::arg("variant"),
        "Select auto, vectors or tiles. Raises ValueError if unsupported.");
  m.def("attention_variant", &attention_variant, "Return the method of attention for many queries: vectors or tiles.");
  m.def("end_on_bus_errors", &end_on_bus_errors, nb::arg("exit_code"), nb::arg("line"),
        "If a mapped file can no longer be read, print the line to stderr and exit with the code.");
  m.def("thread_count", &thread_count, "Return the number of threads that share each operation.");
  m.def(
      "work_shares",
      [] {
        const nb::gil_scoped_release released;
        return work_shares();
      },
      "Return the number of work items done by each thread since the pool was created. Waits for running work.");
  m.def(
      "set_thread_count",
      [](int threads) {
        require(threads >= 1 && threads <= 1024, "the number of threads must be 1 to 1024");
        const nb::gil_scoped_release released;
        set_thread_count(threads);
      },
      nb::arg("threads"), "Replace the thread pool. Waits for running work.");

  m.def(
      "read_memory",
      [](Bytes data, int places) {
        require(places == 1 || places == 2 || places == 4, "places must be 1, 2 or 4");
        const nb::gil_scoped_release released;
        const std::lock_guard<std::mutex> lock(engine_mutex());
        return read_memory(thread_pool(), data.data(), int64_t(data.size()), places);
      },
      exact("data"), nb::arg("places") = 1,
      "Read each whole cache line once, on all threads; each thread reads from `places` positions alternately. "
      "Return the exclusive or of all 64-bit words.");
  m.def(
      "multiply_bytes",
      [](int64_t products) {
        require(products > 0, "products must be at least 1");
        const nb::gil_scoped_release released;
        const std::lock_guard<std::mutex> lock(engine_mutex());
        return multiply_bytes(thread_pool(), products);
      },
      nb::arg("products"),
      "Compute at least this many byte products on all threads, with operands in registers. Return their number.");

  nb::class_<Recording>(m, "Program", "Recorded steps, replayed in one call without the GIL.")
      .def(nb::init<>())
      .def("__len__", [](const Recording& r) { return r.program.size(); })
      .def(
          "begin",
          [](Recording& r) {
            require(recording == nullptr, "another program is being recorded in this thread");
            recording = &r;
          },
          "Record the operations called in this thread, instead of running them.")
      .def(
          "end", [](Recording&) { recording = nullptr; }, "Stop recording.")
      .def(
          "run",
          [](const Recording& r) {
            const nb::gil_scoped_release released;
            r.program.run();
          },
          "Run the steps in order. Raises ValueError if an array contains a row, position or block out of range.");

  m.def(
      "embed_rows",
      [](Bytes data, int format, int64_t rows, int64_t k, int64_t slab_stride, In<int32_t, 1> ids, Out<float, 2> out) {
        require(out.shape(0) == ids.size() && int64_t(out.shape(1)) == k, "out must have a row of k values per id");
        emit(embed_rows(weight_of(data, format, rows, k, slab_stride), ids.data(), int64_t(ids.size()), out.data()),
             data, ids, out);
      },
      exact("data"), nb::arg("format"), nb::arg("rows"), nb::arg("k"), nb::arg("slab_stride"), exact("ids"),
      exact("out"));
  m.def(
      "gather_rows",
      [](In<float, 2> x, In<int32_t, 1> ids, Out<float, 2> out) {
        require(out.shape(0) == ids.size() && out.shape(1) == x.shape(1), "out must have a row of x's width per id");
        emit(gather_rows(x.data(), int64_t(x.shape(0)), int64_t(x.shape(1)), ids.data(), int64_t(ids.size()),
                         out.data()),
             x, ids, out);
      },
      exact("x"), exact("ids"), exact("out"));
  m.def(
      "rms_norm",
      [](In<float, 2> x, In<float, 1> weight, float eps, Out<float, 2> out) {
        require_same_shape(x, out);
        require(x.shape(1) > 0 && weight.size() == x.shape(1),
                "the weight must be as long as a row, with at least one value");
        emit(rms_norm(x.data(), weight.data(), eps, int64_t(x.shape(0)), int64_t(x.shape(1)), out.data()), x, weight,
             out);
      },
      exact("x"), exact("weight"), nb::arg("eps"), exact("out"));
  // slab_strides: 0 for rows as in the file, otherwise bytes from slab to slab. combine: 0 for plain products, 1 to add
  // the product to the output, 2 to write silu(first) * second to the first output. norm may be None.
  m.def(
      "matmul",
      [](In<float, 2> x, const std::vector<Bytes>& data, const std::vector<int>& formats,
         const std::vector<int64_t>& slab_strides, const std::vector<Out<float, 2>>& outs,
         std::optional<In<float, 1>> norm, float eps, int combine) {
        require(data.size() == formats.size() && data.size() == outs.size() && data.size() == slab_strides.size(),
                "data, formats, slab_strides and outs must have the same length");
        require(x.size() > 0 && !data.empty(), "matmul needs at least one weight and one row");
        require(combine == 0 || (combine == 1 && data.size() == 1) || (combine == 2 && data.size() == 2),
                "combine must be 0, 1 with one weight, or 2 with two weights");
        require(!norm || norm->size() == x.shape(1), "norm must have one value per column of x");
        Matmul op{};
        op.x = x.data();
        op.m = int64_t(x.shape(0));
        op.k = int64_t(x.shape(1));
        op.combine = static_cast<Combine>(combine);
        op.eps = eps;
        if (norm) op.norm = norm->data();
        for (size_t i = 0; i < data.size(); i++) {
          require(outs[i].shape(0) == x.shape(0), "each output must have one row per row of x");
          require(combine != 2 || outs[i].shape(1) == outs[0].shape(1),
                  "gate and up must have the same number of rows");
          op.products.push_back({weight_of(data[i], formats[i], int64_t(outs[i].shape(1)), op.k, slab_strides[i]),
                                 const_cast<float*>(outs[i].data())});
        }
        emit(matmul(std::move(op)), x, data, outs, norm);
      },
      exact("x"), exact("data"), nb::arg("formats"), nb::arg("slab_strides"), exact("outs"), exact("norm").none(),
      nb::arg("eps"), nb::arg("combine"));
  m.def(
      "rope",
      [](Out<float, 3> x, In<int32_t, 1> positions, In<float, 2> cosine, In<float, 2> sine, bool adjacent) {
        require(positions.size() == x.shape(0), "positions must have one value per row of x");
        require(x.shape(1) > 0 && x.shape(2) > 0, "rope needs heads and dimensions");
        require(
            2 * cosine.shape(1) == x.shape(2) && sine.shape(0) == cosine.shape(0) && sine.shape(1) == cosine.shape(1),
            "the tables must have the same shape, with half a head per row");
        emit(rope(x.data(), int64_t(x.shape(0)), int64_t(x.shape(1)), int64_t(x.shape(2)), positions.data(),
                  cosine.data(), sine.data(), int64_t(cosine.shape(0)), adjacent),
             x, positions, cosine, sine);
      },
      exact("x"), exact("positions"), exact("cosine"), exact("sine"), nb::arg("adjacent"));
  // format: the number of a CacheFormat. window_tables and window (k8v8) are required below 8 bits, otherwise None.
  m.def(
      "store_key_values",
      [](In<float, 3> k, In<float, 3> v, In<int32_t, 1> positions, In<int32_t, 1> sequences, In<int32_t, 2> tables,
         Out<uint8_t, 4> pool, int format, std::optional<In<int32_t, 2>> window_tables,
         std::optional<Out<uint8_t, 4>> window) {
        require_same_shape(k, v);
        const RowPlaces places = places_of(positions, sequences, tables);
        require(int64_t(k.shape(0)) == places.rows, "k and v must be (rows, kv heads, dim)");
        const KeyValuePool blocks = pool_of(pool, format, int64_t(k.shape(1)), int64_t(k.shape(2)));
        const WindowTiles tiles = window_of(blocks, window_tables, window, places);
        emit(store_key_values(k.data(), v.data(), places, blocks, tiles), k, v, positions, sequences, tables, pool,
             window_tables, window);
      },
      exact("k"), exact("v"), exact("positions"), exact("sequences"), exact("tables"), exact("pool"), nb::arg("format"),
      exact("window_tables").none(), exact("window").none());
  m.def(
      "attention",
      [](In<float, 3> q, In<int32_t, 1> positions, In<int32_t, 1> sequences, In<int32_t, 2> tables,
         Out<uint8_t, 4> pool, int format, int64_t kv_heads, std::optional<In<int32_t, 2>> window_tables,
         std::optional<Out<uint8_t, 4>> window, float scale, Out<float, 3> out) {
        const RowPlaces places = places_of(positions, sequences, tables);
        const KeyValuePool blocks = pool_of(pool, format, kv_heads, int64_t(q.shape(2)));
        const WindowTiles tiles = window_of(blocks, window_tables, window, places);
        require(int64_t(q.shape(0)) == places.rows, "q must be (rows, heads, dim)");
        require(q.shape(1) > 0 && int64_t(q.shape(1)) % kv_heads == 0,
                "the number of heads must be a multiple of kv_heads");
        require(out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) && out.shape(2) == q.shape(2),
                "out must have the shape of q");
        emit(attention(q.data(), int64_t(q.shape(1)), places, blocks, tiles, scale, out.data()), q, positions,
             sequences, tables, pool, window_tables, window, out);
      },
      exact("q"), exact("positions"), exact("sequences"), exact("tables"), exact("pool"), nb::arg("format"),
      nb::arg("kv_heads"), exact("window_tables").none(), exact("window").none(), nb::arg("scale"), exact("out"));
  m.def(
      "silu_mul",
      [](In<float, 2> gate, In<float, 2> up, Out<float, 2> out) {
        require_same_shape(gate, up);
        require_same_shape(gate, out);
        emit(silu_mul(gate.data(), up.data(), int64_t(gate.size()), out.data()), gate, up, out);
      },
      exact("gate"), exact("up"), exact("out"));
  m.def(
      "add",
      [](In<float, 2> a, In<float, 2> b, Out<float, 2> out) {
        require_same_shape(a, b);
        require_same_shape(a, out);
        emit(add(a.data(), b.data(), int64_t(a.size()), out.data()), a, b, out);
      },
      exact("a"), exact("b"), exact("out"));
  m.def(
      "softmax",
      [](Out<float, 2> x) {
        require(x.shape(1) > 0, "softmax needs at least one value");
        emit(softmax(x.data(), int64_t(x.shape(0)), int64_t(x.shape(1))), x);
      },
      exact("x"));
  m.def(
      "argmax",
      [](In<float, 2> x, Out<int32_t, 1> out) {
        require(x.shape(1) > 0 && out.size() == x.shape(0), "argmax needs at least one value, and one output per row");
        emit(argmax(x.data(), int64_t(x.shape(0)), int64_t(x.shape(1)), out.data()), x, out);
      },
      exact("x"), exact("out"));
  m.def(
      "rope_table",
      [](In<double, 1> frequency, In<int32_t, 1> positions, double factor, Out<float, 2> cosine, Out<float, 2> sine) {
        require(cosine.shape(0) == positions.size() && cosine.shape(1) == frequency.size() &&
                    sine.shape(0) == cosine.shape(0) && sine.shape(1) == cosine.shape(1),
                "the tables must have a row per position and a column per frequency");
        emit(rope_table(frequency.data(), int64_t(frequency.size()), positions.data(), int64_t(positions.size()),
                        factor, cosine.data(), sine.data()),
             frequency, positions, cosine, sine);
      },
      exact("frequency"), exact("positions"), nb::arg("factor"), exact("cosine"), exact("sine"));
  m.def(
      "is_packed", [](int format) { return is_packed(static_cast<Format>(format)); }, nb::arg("format"),
      "Return whether the current kernels support packed weights of a format.");
  m.def(
      "packs_by_default", [] { return kernels().packs_by_default; },
      "Return whether packed weights are never slower with the current kernels.");
  m.def(
      "packed_bytes",
      [](int format, int64_t rows, int64_t k, int64_t slab_stride) {
        return packed_bytes({static_cast<Format>(format), nullptr, rows, k, slab_stride});
      },
      nb::arg("format"), nb::arg("rows"), nb::arg("k"), nb::arg("slab_stride"),
      "Return the size of a packed weight whose slabs begin slab_stride bytes apart; with up to 64 rows, of one slab.");
  m.def(
      "pack_weight",
      [](Bytes data, int format, int64_t rows, int64_t k, int64_t slab_stride, Out<uint8_t, 1> out) {
        const Weight from = weight_of(data, format, rows, k);
        weight_of(out, format, rows, k, slab_stride);
        const nb::gil_scoped_release released;
        pack_weight(from, out.data(), slab_stride);
      },
      exact("data"), nb::arg("format"), nb::arg("rows"), nb::arg("k"), nb::arg("slab_stride"), exact("out"),
      "Pack a weight into slabs that begin slab_stride bytes apart. Bytes between slabs are not written.");
  m.def(
      "dequantize",
      [](Bytes data, int format, Out<float, 2> out) {
        const Weight w = weight_of(data, format, int64_t(out.shape(0)), int64_t(out.shape(1)));
        require_aligned(out);
        const nb::gil_scoped_release released;
        for (int64_t row = 0; row < w.rows; row++)
          dequantize_row(w.format, w.data + row * bytes_per_row(w.format, w.k), w.k, out.data() + row * w.k);
      },
      exact("data"), nb::arg("format"), exact("out"));
}

// GPUs for Python. Addresses are integers from `allocate`. Shapes and contents have been checked by
// notso/qtensor/backends/cuda, the only caller. The GIL is not held during calls of the driver.
#include "bindings/cuda.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "cuda/operations.h"

namespace nb = nanobind;
using namespace qtensor;
using namespace qtensor::cuda;

namespace {

using HostBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HostRoom = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WeightFacts = std::tuple<int, Address, int64_t, int64_t>;               // format, address, rows, k
using PoolFacts = std::tuple<Address, int, int, int>;                         // address, kv heads, dim, format
using PlaceFacts = std::tuple<Address, Address, Address, Address, int, int>;  // see Places

using TurnFacts = std::tuple<Address, Address, Address>;  // see Turn

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}
LaidWeight weight_of(const WeightFacts& w) {
  return {static_cast<Format>(std::get<0>(w)), at<const uint8_t>(std::get<1>(w)), std::get<2>(w), std::get<3>(w)};
}
Pool pool_of(const PoolFacts& p) {  // runs of one block
  return {at<uint8_t>(std::get<0>(p)), 1, std::get<1>(p), std::get<2>(p), static_cast<CacheFormat>(std::get<3>(p))};
}
Turn turn_of(const TurnFacts& t) {
  return {at<const int>(std::get<0>(t)), at<const float>(std::get<1>(t)), at<const float>(std::get<2>(t))};
}
Places places_of(const PlaceFacts& p) {
  return {at<const int>(std::get<0>(p)),
          at<const int>(std::get<1>(p)),
          at<const int>(std::get<2>(p)),
          at<const int>(std::get<3>(p)),
          std::get<4>(p),
          std::get<5>(p)};
}
std::pair<size_t, size_t> memory_of(Device& d) {
  const Device::Memory memory = d.memory();
  return {memory.free, memory.total};
}

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::exception<Unavailable>(m, "CudaUnavailable", PyExc_RuntimeError);
  nb::exception<OutOfMemory>(m, "CudaOutOfMemory", PyExc_RuntimeError);
  nb::exception<Lost>(m, "CudaLost", PyExc_RuntimeError);

  m.def(
      "cuda_architectures", [] { return machine_code().architectures; },
      "Return the architectures with machine code in this build, separated by spaces; empty if there are none.");
  m.def(
      "cuda_laid_bytes",
      [](int format, int64_t rows, int64_t k) { return rows * laid_row_bytes(static_cast<Format>(format), k); },
      nb::arg("format"), nb::arg("rows"), nb::arg("k"), "Return the size in bytes of a weight in device memory.");

  nb::class_<Device>(m, "CudaDevice", "A GPU. Every method may raise CudaUnavailable, CudaOutOfMemory or CudaLost.")
      .def(
          "__init__",
          [](Device* self, const std::string& library, int number, const HostBytes& code) {
            const MachineCode built = machine_code();
            const MachineCode given{code.data(), code.size(), built.oldest_driver, ""};
            const nb::gil_scoped_release released;
            new (self) Device(library, number, code.size() > 0 ? given : built);
          },
          nb::arg("library"), nb::arg("number"), nb::arg("code"))
      .def_prop_ro("name", &Device::name)
      .def_prop_ro("architecture", &Device::architecture)
      .def("memory", &memory_of, Unlocked(), "Return the free and the total bytes of device memory.")
      .def("allocate", &Device::allocate, nb::arg("size"), nb::arg("zeroed"), Unlocked())
      .def("free", &Device::free, nb::arg("address"), Unlocked())
      .def(
          "upload",
          [](Device& d, Address to, const HostBytes& from) {
            const nb::gil_scoped_release released;
            d.upload(to, from.data(), from.size());
          },
          nb::arg("to"), nb::arg("source").noconvert())
      .def(
          "download",
          [](Device& d, const HostRoom& to, Address from) {
            const nb::gil_scoped_release released;
            d.download(to.data(), from, to.size());
          },
          nb::arg("to").noconvert(), nb::arg("source"))
      .def("copy", &Device::copy, nb::arg("to"), nb::arg("source"), nb::arg("size"), Unlocked())
      .def("wait", &Device::wait, Unlocked())
      .def(
          "upload_weight",
          [](Device& d, int format, const HostBytes& data, int64_t rows, int64_t k, Address to) {
            const nb::gil_scoped_release released;
            upload_weight(d, static_cast<Format>(format), data.data(), rows, k, to);
          },
          nb::arg("format"), nb::arg("data").noconvert(), nb::arg("rows"), nb::arg("k"), nb::arg("to"))
      .def("capture_begin", &Device::capture_begin, Unlocked())
      .def(
          "capture_end", [](Device& d) { return reinterpret_cast<Address>(d.capture_end()); }, Unlocked())
      .def("capture_drop", &Device::capture_drop, Unlocked())
      .def(
          "run_graph", [](Device& d, Address graph) { d.run_graph(at<void>(graph)); }, nb::arg("graph"), Unlocked())
      .def(
          "free_graph", [](Device& d, Address graph) { d.free_graph(at<void>(graph)); }, nb::arg("graph"), Unlocked())
      .def_prop_ro("scratch_moves", &Device::scratch_moves)

      .def(
          "embed_rows",
          [](Device& d, const WeightFacts& w, Address ids, int64_t rows, Address out) {
            launch_embed(d, weight_of(w), at<const int32_t>(ids), rows, at<float>(out));
          },
          nb::arg("weight"), nb::arg("ids"), nb::arg("rows"), nb::arg("out"), Unlocked())
      .def(
          "gather_rows",
          [](Device& d, Address x, Address ids, int64_t rows, int64_t width, Address out) {
            launch_gather(d, at<const float>(x), at<const int32_t>(ids), rows, width, at<float>(out));
          },
          nb::arg("x"), nb::arg("ids"), nb::arg("rows"), nb::arg("width"), nb::arg("out"), Unlocked())
      .def(
          "matmul",
          [](Device& d, Address x, int64_t m, int64_t k, const std::vector<std::pair<WeightFacts, Address>>& each,
             Address norm, float eps, int join) {
            Products p{at<const float>(x), m, k, {}, at<const float>(norm), eps, static_cast<Join>(join)};
            for (const auto& [weight, y] : each) p.each.push_back({weight_of(weight), at<float>(y)});
            multiply(d, p);
          },
          nb::arg("x"), nb::arg("m"), nb::arg("k"), nb::arg("each"), nb::arg("norm"), nb::arg("eps"), nb::arg("join"),
          Unlocked())
      .def(
          "rope_table",
          [](Device& d, Address frequencies, int64_t pairs, Address positions, int64_t rows, double factor,
             Address cosine, Address sine) {
            launch_rope_table(d, at<const double>(frequencies), pairs, at<const int32_t>(positions), rows, factor,
                              at<float>(cosine), at<float>(sine));
          },
          nb::arg("frequencies"), nb::arg("pairs"), nb::arg("positions"), nb::arg("rows"), nb::arg("factor"),
          nb::arg("cosine"), nb::arg("sine"), Unlocked())
      .def(
          "rope",
          [](Device& d, Address x, int64_t rows, int64_t heads, int64_t dim, Address positions, Address cosine,
             Address sine, bool adjacent) {
            launch_rope(d, at<float>(x), rows, heads, dim, at<const int32_t>(positions), at<const float>(cosine),
                        at<const float>(sine), adjacent);
          },
          nb::arg("x"), nb::arg("rows"), nb::arg("heads"), nb::arg("dim"), nb::arg("positions"), nb::arg("cosine"),
          nb::arg("sine"), nb::arg("adjacent"), Unlocked())
      .def(
          "store_key_values",
          [](Device& d, Address k, Address v, const PlaceFacts& places, const PoolFacts& pool,
             const PoolFacts& window) {
            launch_store(d, at<const float>(k), at<const float>(v), places_of(places), pool_of(pool), pool_of(window));
          },
          nb::arg("k"), nb::arg("v"), nb::arg("places"), nb::arg("pool"), nb::arg("window"), Unlocked())
      .def(
          "attention",
          [](Device& d, Address q, int64_t heads, const PlaceFacts& places, const PoolFacts& pool,
             const PoolFacts& window, float scale, int64_t tiles, Address out) {
            attend(d, at<const float>(q), heads, places_of(places), pool_of(pool), pool_of(window), scale, tiles,
                   at<float>(out));
          },
          nb::arg("q"), nb::arg("heads"), nb::arg("places"), nb::arg("pool"), nb::arg("window"), nb::arg("scale"),
          nb::arg("tiles"), nb::arg("out"), Unlocked())
      .def(
          "store_and_attend",
          [](Device& d, const TurnFacts& of_keys, Address k, Address v, const PlaceFacts& stored,
             const TurnFacts& of_queries, Address q, int64_t heads, const PlaceFacts& attended, const PoolFacts& pool,
             const PoolFacts& window, float scale, int64_t tiles, Address out) {
            const Layer layer{turn_of(of_keys),  turn_of(of_queries), at<float>(k), at<const float>(v),
                              places_of(stored), at<float>(q),        heads,        places_of(attended),
                              pool_of(pool),     pool_of(window),     scale};
            store_and_attend(d, layer, tiles, at<float>(out));
          },
          nb::arg("of_keys"), nb::arg("k"), nb::arg("v"), nb::arg("stored"), nb::arg("of_queries"), nb::arg("q"),
          nb::arg("heads"), nb::arg("attended"), nb::arg("pool"), nb::arg("window"), nb::arg("scale"), nb::arg("tiles"),
          nb::arg("out"), Unlocked())
      .def(
          "silu_mul",
          [](Device& d, Address gate, Address up, int64_t count, Address out) {
            launch_silu_mul(d, at<const float>(gate), at<const float>(up), count, at<float>(out));
          },
          nb::arg("gate"), nb::arg("up"), nb::arg("count"), nb::arg("out"), Unlocked())
      .def(
          "argmax",
          [](Device& d, Address x, int64_t rows, int64_t width, Address out) {
            launch_argmax(d, at<const float>(x), rows, width, at<int32_t>(out));
          },
          nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("out"), Unlocked())
      .def(
          "softmax",
          [](Device& d, Address x, int64_t rows, int64_t width) { launch_softmax(d, at<float>(x), rows, width); },
          nb::arg("x"), nb::arg("rows"), nb::arg("width"), Unlocked());
}

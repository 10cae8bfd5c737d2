#include "recall/h2o-archive-file.h"

#include "kernels/h2o-row-types.h"
#include "recall/h2o-checksum.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

static constexpr uint64_t PADDING = llama_h2o_archive_layout::PADDING;

static constexpr uint64_t PAGE_MAGIC = 0x68326f7061676501; // "h2opage"; the last byte is the version

static uint64_t checksum_of(const void * data, size_t size) {
    llama_h2o_checksum res;
    res.add(data, size);

    return res.value();
}

static uint64_t padded(uint64_t size) {
    return (size + PADDING - 1) / PADDING * PADDING;
}

static uint64_t row_bytes(ggml_type type, uint32_t n_embd) {
    const int64_t n_block = ggml_blck_size(type);
    if (n_embd % n_block != 0) {
        throw std::runtime_error("a head's row of " + std::to_string(n_embd) + " elements is not whole blocks of " +
                                 std::to_string(n_block) + ": use type f16 for the archive");
    }

    return ggml_row_size(type, n_embd);
}

llama_h2o_archive_layout::llama_h2o_archive_layout(std::vector<llama_h2o_archive_layer> layers, ggml_type type) :
    type_rows(type), shapes(std::move(layers)) {
    if (!llama_h2o_has_row_type(type)) {
        throw std::runtime_error("unsupported type of archived rows: use f32, f16, q8_0 or q4_0");
    }

    uint64_t end = PADDING;
    for (const auto & layer : shapes) {
        if (layer.n_embd_k == 0) {
            throw std::runtime_error("a head's row of 0 elements cannot be archived");
        }

        const uint64_t size_k = row_bytes(type, layer.n_embd_k);
        rows.push_back({ end, size_k, size_k + row_bytes(type, layer.n_embd_v) });
        end = rows.back().offset(layer.n_head_kv);
    }
    n_bytes = padded(end);
}

uint64_t llama_h2o_archive_layout::checksum() const {
    const uint32_t type = type_rows;

    llama_h2o_checksum res;
    res.add(&type, sizeof(type));
    res.add(shapes.data(), shapes.size() * sizeof(shapes[0]));

    return res.value();
}

uint64_t llama_h2o_archive_layout::checksum_rows(const char * page) const {
    return checksum_of(page + PADDING, n_bytes - PADDING);
}

void llama_h2o_archive_page_header::start(int32_t begin, int32_t p, uint64_t text_before) {
    this->magic       = PAGE_MAGIC;
    this->page        = uint32_t(p) / N_PAGE;
    this->begin       = begin;
    this->first       = p;
    this->text_before = text_before;
}

uint64_t llama_h2o_archive_page_header::text() const {
    return checksum_of(this, offsetof(llama_h2o_archive_page_header, checksum_rows));
}

bool llama_h2o_archive_page_header::is_whole() const {
    // the last position of any text is in this page
    static constexpr uint32_t MAX_PAGES = std::numeric_limits<int32_t>::max() / N_PAGE;

    return magic == PAGE_MAGIC && page < MAX_PAGES && uint32_t(first) / N_PAGE == page &&
           count == N_PAGE - uint32_t(first) % N_PAGE && begin >= 0 && begin <= first;
}

bool llama_h2o_archive_page_header::is_sound() const {
    return checksum == checksum_of(this, offsetof(llama_h2o_archive_page_header, checksum));
}

void llama_h2o_archive_page_header::set_checksum() {
    checksum = checksum_of(this, offsetof(llama_h2o_archive_page_header, checksum));
}

//
// file header
//

static constexpr char MAGIC[]     = { 'h', '2', 'o', ' ', 'r', 'o', 'w', 's' };
static constexpr uint32_t VERSION = 1;

// memory is mapped in steps of this size
static constexpr uint64_t EXTENT_BYTES = 1 << 28;

// The start of the file, without padding; the shapes of the layers and a checksum follow.
struct file_header {
    char magic[sizeof(MAGIC)];
    uint32_t version;
    uint32_t type;
    uint32_t n_page; // tokens per page
    uint32_t n_layer;
    uint64_t page_size;
    uint64_t max_pages;
    llama_h2o_archive_id id;
};

static uint64_t size_of_layers(uint32_t n_layer) {
    return n_layer * sizeof(llama_h2o_archive_layer);
}

static std::vector<char> make_header(
        const llama_h2o_archive_layout & layout, const llama_h2o_archive_id & id, uint64_t max_pages) {
    file_header header = {};
    std::memcpy(header.magic, MAGIC, sizeof(MAGIC));
    header.version   = VERSION;
    header.type      = layout.type();
    header.n_page    = llama_h2o_archive_layout::N_PAGE;
    header.n_layer   = layout.layers().size();
    header.page_size = layout.size();
    header.max_pages = max_pages;
    header.id        = id;

    const uint64_t size = sizeof(header) + size_of_layers(header.n_layer);
    std::vector<char> res(padded(size + sizeof(uint64_t)));
    std::memcpy(res.data(), &header, sizeof(header));
    std::memcpy(res.data() + sizeof(header), layout.layers().data(), size_of_layers(header.n_layer));

    const uint64_t checksum = checksum_of(res.data(), size);
    std::memcpy(res.data() + size, &checksum, sizeof(checksum));

    return res;
}

// The first difference between two headers with the same limit. Both start with a complete struct.
static const char * difference(const std::vector<char> & found, const std::vector<char> & wanted) {
    file_header a;
    file_header b;
    std::memcpy(&a, found.data(), sizeof(a));
    std::memcpy(&b, wanted.data(), sizeof(b));

    if (a.version != b.version) {
        return "is an archive of another version";
    }

    const uint64_t size = sizeof(a) + size_of_layers(a.n_layer);
    uint64_t checksum   = 0;
    if (size + sizeof(checksum) <= found.size()) {
        std::memcpy(&checksum, found.data() + size, sizeof(checksum));
    }
    if (checksum == 0 || checksum != checksum_of(found.data(), size)) {
        return "is a damaged archive";
    }
    if (a.type != b.type) {
        return "is an archive of rows of another type";
    }

    return a.id != b.id ? "is the archive of another text" : "is an archive of another model";
}

llama_h2o_archive_file::llama_h2o_archive_file(const std::string & path,
        const llama_h2o_archive_layout & layout,
        const llama_h2o_archive_id & id,
        uint64_t max_pages) : layout(layout), file(path) {
    limit      = open_header(path, id, max_pages);
    first_page = make_header(layout, id, limit).size();
    n_extent   = std::max<uint64_t>(1, EXTENT_BYTES / layout.size());

    read_places();
}

// Returns the limit of the file.
uint64_t llama_h2o_archive_file::open_header(
        const std::string & path, const llama_h2o_archive_id & id, uint64_t max_pages) {
    std::vector<char> wanted = make_header(layout, id, max_pages);
    std::vector<char> found(std::min<uint64_t>(file.size(), wanted.size()));
    file.read(0, found.data(), found.size());

    // recreate a file that contains only a part of our header, but never overwrite a file with other content
    const bool is_new = found.size() < wanted.size() && std::equal(found.begin(), found.end(), wanted.begin());
    if (is_new) {
        file.write(0, wanted.data(), wanted.size());
        return max_pages;
    }

    found.resize(wanted.size());
    file_header header;
    std::memcpy(&header, found.data(), sizeof(header));
    if (!std::equal(MAGIC, MAGIC + sizeof(MAGIC), header.magic)) {
        throw std::runtime_error(path + " is not an archive");
    }

    wanted = make_header(layout, id, header.max_pages);
    if (found != wanted) {
        throw std::runtime_error(path + " " + difference(found, wanted));
    }
    if (header.max_pages > std::numeric_limits<uint64_t>::max() / layout.size()) {
        throw std::runtime_error(path + " is a damaged archive"); // slots depend on the limit
    }

    return header.max_pages;
}

//
// pages in the file
//

void llama_h2o_archive_file::read_places() {
    const uint64_t size = file.size();
    const uint64_t n    = size < first_page ? 0 : (size - first_page) / layout.size();

    places.resize(limit > 0 ? std::min(n, limit) : n);
    const place * newest = nullptr;
    for (uint64_t i = 0; i < places.size(); ++i) {
        llama_h2o_archive_page_header header;
        file.read(offset_of(i), &header, sizeof(header));
        if (!header.is_sound() || !header.is_whole()) {
            continue;
        }

        map_place(i);
        places[i] = place(header);
        if (!newest || newest->page < header.page) {
            newest         = &places[i];
            page_of_place0 = limit > 0 ? (header.page + limit - i) % limit : header.page - i;
        }
    }

    if (newest) {
        find(newest->page + 1, newest->text);
    }
}

uint64_t llama_h2o_archive_file::place_of(uint64_t page) const {
    return limit > 0 ? (page + limit - page_of_place0) % limit : page - page_of_place0;
}

const llama_h2o_archive_file::place * llama_h2o_archive_file::find_page(uint64_t page, uint64_t text) const {
    const uint64_t i = place_of(page);
    const bool is_it = text != 0 && i < places.size() && places[i].page == page && places[i].text == text;

    return is_it ? &places[i] : nullptr;
}

llama_h2o_archive_file::place::place(const llama_h2o_archive_page_header & header) :
    page(header.page), begin(header.begin), first(header.first), text_before(header.text_before), text(header.text()) {}

bool llama_h2o_archive_file::place::can_precede(const place & next) const {
    return begin == next.begin && uint32_t(next.first) % llama_h2o_archive_layout::N_PAGE == 0;
}

void llama_h2o_archive_file::find(uint32_t page_end, uint64_t text) {
    current_begin = page_end;
    current_end   = page_end;
    has_others    = true;

    const place * first = nullptr;
    while (current_begin > 0) {
        const place * before = find_page(current_begin - 1, text);
        if (!before || (first && !before->can_precede(*first))) {
            return;
        }
        first = before;
        text  = before->text_before;
        --current_begin;
    }
}

void llama_h2o_archive_file::begin_at(uint32_t page) {
    current_begin = page;
    has_others    = true;
}

void llama_h2o_archive_file::map_place(uint64_t i) {
    while (extents.size() <= i / n_extent) {
        extents.push_back(file.map(offset_of(extents.size() * n_extent), n_extent * layout.size()));
    }
}

const char * llama_h2o_archive_file::page(uint32_t page) const {
    const uint64_t i = place_of(page);

    return extents[i / n_extent] + i % n_extent * layout.size();
}

void llama_h2o_archive_file::release(uint32_t page) const {
    llama_h2o_mapped_file::release(this->page(page), layout.size());
}

bool llama_h2o_archive_file::is_sound(uint32_t page) const {
    const char * data   = this->page(page);
    const auto & header = llama_h2o_archive_header(data);

    return header.is_sound() && layout.checksum_rows(data) == header.checksum_rows;
}

//
// writing
//

void llama_h2o_archive_file::drop_page(uint64_t i) {
    static constexpr char ZEROS[PADDING] = {};

    places[i] = {};
    file.write(offset_of(i), ZEROS, sizeof(ZEROS));
}

void llama_h2o_archive_file::drop_others() {
    if (current_begin == current_end) {
        places.clear();
        file.truncate(first_page);
    }

    for (uint64_t i = 0; i < places.size(); ++i) {
        const auto & each     = places[i];
        const bool is_current = each.page >= current_begin && each.page < current_end && place_of(each.page) == i;
        if (each.text != 0 && !is_current) {
            drop_page(i);
        }
    }

    has_others = false;
}

// Writes the header last: without it the page is invalid.
void llama_h2o_archive_file::write(uint64_t i, char * page) {
    auto & header        = *reinterpret_cast<llama_h2o_archive_page_header *>(page);
    header.checksum_rows = layout.checksum_rows(page);
    header.set_checksum();

    file.write(offset_of(i) + PADDING, page + PADDING, layout.size() - PADDING);
    file.write(offset_of(i), page, PADDING);
}

void llama_h2o_archive_file::append(char * page) {
    const auto & header = llama_h2o_archive_header(page);

    if (header.page != current_end || !find_page(header.page - 1, header.text_before)) {
        find(header.page, header.text_before);
    }
    if (current_begin == current_end) {
        page_of_place0 = limit > 0 ? header.page % limit : header.page;
    }
    if (has_others) {
        drop_others();
    }
    if (current_end - current_begin == limit && limit > 0) {
        ++current_begin;
    }

    // its slot, whose previous page becomes invalid
    const uint64_t i = place_of(header.page);
    map_place(i);
    places.resize(std::max(uint64_t(places.size()), i + 1));
    if (places[i].text != 0) {
        drop_page(i);
    }
    write(i, page);
    places[i]   = place(header);
    current_end = header.page + 1;
}

// The pages of an archive in a file.

#pragma once

#include "recall/h2o-archive-layout.h"
#include "recall/h2o-archive-map.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// Says which text an archive is of; it is made by chance.
using llama_h2o_archive_id = std::array<uint8_t, 16>;

// A header and whole pages behind it, each in a place that follows from its number. Where the number of pages is limited the
// places are used in turn. A page counts once its header is right, and that is written last: what a crash or a full disk leaves
// behind is written over. Some pages, one after the other in one text, are current. Others stay until one is written that
// does not follow the current ones.
class llama_h2o_archive_file {
public:
    // Opens the file, or makes one; the newest pages are current. Throws std::runtime_error with the reason where it cannot be
    // opened, or is of another model, type or text.
    //   max_pages   of a file that is made; 0: no limit
    llama_h2o_archive_file(const std::string & path,
            const llama_h2o_archive_layout & layout,
            const llama_h2o_archive_id & id,
            uint64_t max_pages);

    uint64_t max_pages() const { return limit; }

    // current: page_begin() <= page < page_end()
    uint32_t page_begin() const { return current_begin; }
    uint32_t page_end() const { return current_end; }

    // valid for as long as the file is open
    const char * page(uint32_t page) const;

    // Makes those pages current that lie before this one in the text that has this checksum there; none if they are not in
    // the file.
    void find(uint32_t page_end, uint64_t text);

    // This current page is the first one now, and those before it are not current.
    void begin_at(uint32_t page);

    // Writes a whole page behind those that it follows, and those alone stay. With a limit, the oldest may go. Throws
    // std::runtime_error where it cannot be written; the page does not count then.
    void append(char * page);

    // Whether a page is what was written. Reads all of it.
    bool is_sound(uint32_t page) const;

    // all that was written is there after a power cut
    void sync() { file.sync(); }

    // the page is not read for a while
    void release(uint32_t page) const;

private:
    // What the header of a page says; not known where `text` is 0.
    struct place {
        uint32_t page        = 0;
        int32_t begin        = 0;
        int32_t first        = 0;
        uint64_t text_before = 0;
        uint64_t text        = 0;

        place() = default;
        explicit place(const llama_h2o_archive_page_header & header);

        // whether this page and the next one can be of the same archive, if they are of the same text
        bool can_precede(const place & next) const;
    };

    const llama_h2o_archive_layout & layout;
    llama_h2o_mapped_file file;

    uint64_t limit      = 0;
    uint64_t first_page = 0; // bytes in front of it

    std::vector<place> places;
    std::vector<const char *> extents; // memory of so many places each:
    uint64_t n_extent = 0;

    uint64_t page_of_place0 = 0; // any of those that can lie there
    uint32_t current_begin  = 0;
    uint32_t current_end    = 0;

    bool has_others = false; // pages that are not current

    uint64_t open_header(const std::string & path, const llama_h2o_archive_id & id, uint64_t max_pages);
    void read_places();

    uint64_t place_of(uint64_t page) const;
    uint64_t offset_of(uint64_t i) const { return first_page + i * layout.size(); }
    const place * find_page(uint64_t page, uint64_t text) const;

    void write(uint64_t i, char * page);
    void forget_page(uint64_t i);
    void forget_others();
    void map_place(uint64_t i);
};

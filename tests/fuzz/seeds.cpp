// Writes the seeds in tests/fuzz/corpus: valid states and files.
//
//   seeds FOLDER

#include "archives.h"
#include "caches.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

// Writes an input: the selecting bytes, then the parsed data.
static void write(
        const std::filesystem::path & folder, const std::string & name, const bytes & front, const bytes & content) {
    std::filesystem::create_directories(folder);
    std::ofstream out(folder / name, std::ios::binary);
    for (const bytes & part : { front, content }) {
        out.write(reinterpret_cast<const char *>(part.data()), std::streamsize(part.size()));
    }
    expect(out.flush().good(), "a seed can be written");
}

// Texts after compactions and re-bases, and a short one.
static void write_states(const std::filesystem::path & folder) {
    random_numbers random(1);
    for (size_t i = 0; i < n_caches(); ++i) {
        cache & text = cache::of(i);
        for (const uint32_t n : { 5u, 66u }) {
            if (n == 5 && i > 0) {
                continue; // one says enough of what is short
            }
            text.clear();
            for (uint32_t done = 0; done < n; done += 11) {
                expect(text.read(random_tokens(std::min(11u, n - done), random)), "a text can be read");
            }
            write(folder, "cache-" + std::to_string(i) + "-" + std::to_string(n), { uint8_t(i), uint8_t(n) },
                    text.state());
        }
    }
}

static void write_archives(const std::filesystem::path & folder) {
    random_numbers random(2);
    for (const uint8_t settings : { 3, 3 + 4 + 16 }) { // q4_0; with a layer that has no V, and two pages at most
        const auto archive = new_archive(settings);
        extend(*archive, settings == 3 ? 140 : 80, random);
        write(folder / "archive_states", std::to_string(settings), { settings, 0 }, state_of(*archive));

        const auto in_file = new_archive(settings);
        const memory_file file({});
        in_file->open_file(file.path(), TEXT_ID);
        for (int n = 0; n < 4; ++n) { // two whole pages, not all at once
            extend(*in_file, 80, random);
        }
        write(folder / "archive_files", std::to_string(settings), { settings, 0 }, file.content());
    }
}

int main(int n, char ** arguments) {
    if (n != 2) {
        std::fprintf(stderr, "usage: seeds FOLDER\n");
        return 2;
    }

    const std::filesystem::path folder = arguments[1];
    write_states(folder / "states");
    write_archives(folder);

    return 0;
}

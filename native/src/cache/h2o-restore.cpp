#include "cache/h2o-restore.h"

#include "cache/h2o-rebase.h"
#include "kernels/h2o-row-types.h"

#include <algorithm>

std::vector<int32_t> llama_h2o_restorable(const llama_h2o_stream & st) {
    std::vector<int32_t> res;
    if (!st.archive) {
        return res;
    }

    const auto add = [&](int64_t p0, int64_t p1) {
        for (int64_t p = std::max<int64_t>(p0, st.archive->first()); p < std::min<int64_t>(p1, st.archive->next());
                ++p) {
            res.push_back(int32_t(p));
        }
    };

    add(0, st.claims.n_pinned);
    for (const auto & span : st.claims.spans) {
        add(std::max<int64_t>(span.p0, st.claims.n_pinned), span.p1);
    }

    return res;
}

std::vector<int32_t> llama_h2o_missing(const std::vector<int32_t> & restorable, const std::vector<int32_t> & held) {
    std::vector<uint8_t> is_held(restorable.size(), 0);
    for (size_t i = 0; !restorable.empty() && i < held.size(); ++i) {
        const auto it = std::lower_bound(restorable.begin(), restorable.end(), held[i]);
        if (it != restorable.end() && *it == held[i]) {
            is_held[it - restorable.begin()] = 1;
        }
    }

    std::vector<int32_t> res;
    for (size_t i = 0; i < restorable.size(); ++i) {
        if (!is_held[i]) {
            res.push_back(restorable[i]);
        }
    }

    return res;
}

bool llama_h2o_has_missing(const llama_h2o_parts & parts, uint32_t s) {
    const auto & st = parts.streams[s];

    const std::vector<int32_t> restorable = llama_h2o_restorable(st);
    if (restorable.empty()) {
        return false;
    }

    const std::vector<uint32_t> used = parts.cells.used(s);
    for (uint32_t h = 0; h < parts.n_heads(); ++h) {
        std::vector<int32_t> held;
        for (const uint32_t cell : used) {
            held.push_back(st.rows.pos(h, cell, parts.cells[s].pos_get(cell)));
        }
        if (!llama_h2o_missing(restorable, held).empty()) {
            return true;
        }
    }

    return false;
}

static void restore_values(const llama_h2o_layer & layer,
        uint32_t ikv,
        uint32_t s,
        const llama_h2o_archive & archive,
        const std::vector<llama_h2o_restored> * restored) {
    if (!layer.tensors.v) {
        return; // a part of the keys
    }

    llama_h2o_host_rows rows(layer.tensors.v, s);
    std::vector<float> row(layer.shape.v.n_embd_head);
    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        for (const auto & one : restored[head]) {
            const char * values = archive.v(archive.page_of(one.pos), ikv, head);
            const size_t offset = one.pos % llama_h2o_archive::N_PAGE * archive.row_size(ikv);
            llama_h2o_to_floats(archive.type(), values + offset, row.data(), int64_t(row.size()));
            llama_h2o_write_row(rows.data(), layer.shape.v, head, one.cell, row.data());
        }
    }
    rows.commit();
}

void llama_h2o_restore(
        llama_h2o_parts & parts, uint32_t s, const std::vector<std::vector<llama_h2o_restored>> & restored) {
    const auto is_empty = [](const std::vector<llama_h2o_restored> & list) {
        return list.empty();
    };
    if (std::all_of(restored.begin(), restored.end(), is_empty)) {
        return;
    }

    auto & st = parts.streams[s];
    for (uint32_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        const auto & layer = parts.layers[ikv];
        const auto * lists = restored.data() + layer.shape.first_head;

        restore_values(layer, ikv, s, *st.archive, lists);
        for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
            for (const auto & one : lists[head]) {
                st.rows.replace(layer.shape.first_head + head, one.cell, one.pos);
            }
        }
    }

    llama_h2o_turn_rows(parts, s, 0, st.rows.rope_pos(parts.cells.newest(s) + 1), restored);
}

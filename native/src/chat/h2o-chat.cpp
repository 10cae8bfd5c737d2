#include "llama-h2o-chat.h"

#include "chat-peg-parser.h"
#include "chat.h"
#include "h2o-template-limits.h"
#include "json.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>

using json = common_json;

// Maximum nesting of brackets, because llama.cpp parses recursively.
static constexpr int MAX_DEPTH = 200;

// Some templates need a number of steps quadratic in the number of messages; this is enough for thousands.
static constexpr h2o_template_limits CHAT = { 100'000'000, 1 << 30, 2 * MAX_DEPTH,
    "the chat template takes too much time or memory: shorten the conversation, or use another model file" };

// Limits while llama.cpp probes the capabilities of a template with a few short messages.
static constexpr h2o_template_limits FIRST_CHECK = { 200'000, 64 << 20, 2 * MAX_DEPTH,
    "it takes too much time or memory" };

struct llama_h2o_chat_template {
    common_chat_templates_ptr templates;

    // for parsers: with the text of EOS after them, llama.cpp detects the start of calls incorrectly
    common_chat_templates_ptr without_eos;
};

struct llama_h2o_chat_parser {
    common_chat_format format;
    std::string generation_prompt;
    common_peg_arena arena;
};

static char * copy_of(const std::string & text) {
    auto * copy = (char *) std::malloc(text.size() + 1);
    if (copy) {
        std::memcpy(copy, text.c_str(), text.size() + 1);
    }

    return copy;
}

// Calls fn() and converts exceptions to error texts.
template <typename F>
static auto caught(char ** error, F fn) -> decltype(fn()) {
    *error = nullptr;
    try {
        return fn();
    } catch (const std::bad_alloc &) {
        return nullptr;
    } catch (const std::exception & err) {
        *error = copy_of(err.what());
        return nullptr;
    }
}

static json parsed(const char * text) {
    int depth      = 0;
    bool in_string = false;
    for (const char * c = text; *c; ++c) {
        if (in_string) {
            c         += *c == '\\' && c[1];
            in_string  = *c != '"';
        } else if (*c == '"') {
            in_string = true;
        } else if (*c == '{' || *c == '[') {
            if (++depth > MAX_DEPTH) {
                throw std::runtime_error("it is nested too deeply");
            }
        } else if (*c == '}' || *c == ']') {
            --depth;
        }
    }

    return json::parse(text);
}

void llama_h2o_chat_text_free(char * text) {
    std::free(text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Prompts
// ---------------------------------------------------------------------------------------------------------------------

llama_h2o_chat_template * llama_h2o_chat_template_init(
        const char * source, const char * bos, const char * eos, char ** error) {
    return caught(error, [&] {
        // common_chat_templates_init() replaces an empty template by that of a model, and hides errors in others
        h2o_limits = FIRST_CHECK;
        common_chat_template(source, bos, eos);
        h2o_limits.take(0); // llama.cpp ignores errors while it probes a template
        if (!*source) {
            throw std::invalid_argument("the template is empty");
        }
        h2o_limits = CHAT;

        auto tmpl       = std::make_unique<llama_h2o_chat_template>();
        tmpl->templates = common_chat_templates_init(nullptr, source, bos, eos);
        if (*eos && std::strstr(source, "eos_token")) {
            tmpl->without_eos = common_chat_templates_init(nullptr, source, bos, "");
        }
        return tmpl.release();
    });
}

void llama_h2o_chat_template_free(llama_h2o_chat_template * tmpl) {
    delete tmpl;
}

static common_chat_templates_inputs inputs_of(const json & request) {
    common_chat_templates_inputs inputs;
    inputs.reasoning_format    = COMMON_REASONING_FORMAT_DEEPSEEK;
    inputs.messages            = common_chat_msgs_parse_oaicompat(request.at("messages"));
    inputs.parallel_tool_calls = request.value("parallel_tool_calls", true);
    inputs.enable_thinking     = request.value("enable_thinking", true);
    inputs.tool_choice         = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    if (request.value("continue_final_message", false)) {
        inputs.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
    }
    if (request.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(request.at("tools"));
    }
    if (request.contains("json_schema")) {
        inputs.json_schema = request.at("json_schema").dump();
    }
    if (request.contains("chat_template_kwargs")) {
        for (const auto & [name, value] : request.at("chat_template_kwargs").items()) {
            inputs.chat_template_kwargs[name] = value.dump();
        }
    }

    return inputs;
}

// The texts that end plain text in a parser.
static std::set<std::string> marks_of(const std::string & parser) {
    std::set<std::string> marks;
    if (parser.empty()) {
        return marks;
    }

    const json arena = json::parse(parser);
    for (const auto & each : arena.at("parsers")) {
        if (!each.contains("delimiters")) {
            continue;
        }
        for (const auto & text : each.at("delimiters")) {
            marks.insert(text.get<std::string>());
        }
    }

    return marks;
}

char * llama_h2o_chat_apply(const llama_h2o_chat_template * tmpl, const char * request, char ** error) {
    return caught(error, [&] {
        h2o_limits = CHAT;

        const common_chat_templates_inputs inputs = inputs_of(parsed(request));

        common_chat_params params = common_chat_templates_apply(tmpl->templates.get(), inputs);
        if (tmpl->without_eos) {
            std::string prompt = std::move(params.prompt);
            params             = common_chat_templates_apply(tmpl->without_eos.get(), inputs);
            params.prompt      = std::move(prompt);
        }

        json triggers = json::array();
        for (const auto & trigger : params.grammar_triggers) {
            triggers.push_back({ { "type", int(trigger.type) }, { "value", trigger.value } });
        }

        const json result = {
            { "prompt", params.prompt },
            { "generation_prompt", params.generation_prompt },
            { "grammar", params.grammar },
            { "grammar_lazy", params.grammar_lazy },
            { "triggers", triggers },
            { "stops", params.additional_stops },
            { "preserved_tokens", params.preserved_tokens },
            { "supports_thinking", params.supports_thinking },
            { "thinking_start_tag", params.thinking_start_tag },
            { "thinking_end_tags", params.thinking_end_tags },
            { "format", int(params.format) },
            { "parser", params.parser },
            { "marks", marks_of(params.parser) },
            { "caps", common_chat_templates_get_caps(tmpl->templates.get()) },
        };

        return copy_of(result.dump_safe());
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Answers
// ---------------------------------------------------------------------------------------------------------------------

llama_h2o_chat_parser * llama_h2o_chat_parser_init(const char * params, char ** error) {
    return caught(error, [&] {
        const json given  = parsed(params);
        const auto format = given.at("format").get<int>();
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
            throw std::invalid_argument("the format is unknown");
        }

        auto parser               = std::make_unique<llama_h2o_chat_parser>();
        parser->format            = common_chat_format(format);
        parser->generation_prompt = given.at("generation_prompt").get<std::string>();

        auto saved = given.at("parser").get<std::string>();
        if (saved.empty()) {
            parser->arena = build_chat_peg_parser([](auto & p) { return p.content(p.rest()); });
            parser->generation_prompt.clear();
        } else {
            parser->arena.load(saved);
        }
        return parser.release();
    });
}

void llama_h2o_chat_parser_free(llama_h2o_chat_parser * parser) {
    delete parser;
}

static std::unique_ptr<common_chat_peg_mapper> mapper_of(common_chat_format format, common_chat_msg & message) {
    switch (format) {
        case COMMON_CHAT_FORMAT_PEG_GEMMA4:
            return std::make_unique<common_chat_peg_gemma4_mapper>(message);
        case COMMON_CHAT_FORMAT_PEG_MINIMAX_M3:
            return std::make_unique<common_chat_peg_minimax_m3_mapper>(message);
        default:
            return std::make_unique<common_chat_peg_mapper>(message);
    }
}

char * llama_h2o_chat_parse(const llama_h2o_chat_parser * parser, const char * text, size_t size, char ** error) {
    return caught(error, [&] {
        // Lenient even for complete answers, because they may have been cut off anywhere.
        common_peg_parse_context ctx(
                parser->generation_prompt + std::string(text, size), COMMON_PEG_PARSE_FLAG_LENIENT);
        const common_peg_parse_result parse = parser->arena.parse(ctx);

        common_chat_msg message;
        json nodes = json::array();
        if (!parse.fail()) {
            mapper_of(parser->format, message)->from_ast(ctx.ast, parse);

            const auto start = int64_t(parser->generation_prompt.size());
            ctx.ast.visit(parse, [&](const common_peg_ast_node & node) {
                if (node.tag == common_chat_peg_builder::REASONING || node.tag == common_chat_peg_builder::CONTENT ||
                        node.tag == common_chat_peg_builder::TOOL) {
                    nodes.push_back({
                            { "tag", node.tag },
                            { "begin", int64_t(node.start) - start },
                            { "end", int64_t(node.end) - start },
                            { "plain", node.children.empty() },
                    });
                }
            });
        }

        json calls = json::array();
        for (const auto & call : message.tool_calls) {
            calls.push_back({ { "id", call.id }, { "name", call.name }, { "arguments", call.arguments } });
        }

        const json result = {
            { "failed", parse.fail() },
            { "end", int64_t(parse.end) - int64_t(parser->generation_prompt.size()) },
            { "reasoning_content", message.reasoning_content },
            { "content", message.content },
            { "tool_calls", calls },
            { "nodes", nodes },
        };

        return copy_of(result.dump_safe());
    });
}

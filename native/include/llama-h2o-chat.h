// Chat templates and parsers of llama.cpp (common/chat.h): a template renders messages as a prompt, and a parser splits the
// generated text into reasoning, content and tool calls.
//
// Texts are UTF-8; requests and results are JSON with OpenAI's names where there are any. Free results with
// llama_h2o_chat_text_free(). On failure, functions return null and set *error to a message, which must be freed in the
// same way, or to null if out of memory. No exception leaves this interface. Templates and parsers are thread-safe.

#pragma once

#include "llama-h2o.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llama_h2o_chat_template;
struct llama_h2o_chat_parser;

LLAMA_H2O_API void llama_h2o_chat_text_free(char * text);

// Compile a Jinja template. bos and eos are the texts of these tokens.
LLAMA_H2O_API struct llama_h2o_chat_template * llama_h2o_chat_template_init(
        const char * source, const char * bos, const char * eos, char ** error);

LLAMA_H2O_API void llama_h2o_chat_template_free(struct llama_h2o_chat_template * tmpl);

// Render a prompt.
//   request  { messages, tools, tool_choice: "auto", "required" or "none", parallel_tool_calls, json_schema,
//              enable_thinking, chat_template_kwargs, continue_final_message: the last message is the start of the
//              answer, or of its reasoning if it has no content }; only messages is required
// Returns { prompt, generation_prompt: the end of the prompt, after the messages; grammar: "" for none; grammar_lazy: the
//   grammar applies after one of triggers [{ type, value }]; stops; preserved_tokens: texts of special tokens that the parser
//   needs; supports_thinking; thinking_start_tag; thinking_end_tags; format and parser: for llama_h2o_chat_parser_init();
//   marks: texts that end plain text; caps: { name: bool }, capabilities of the template }
LLAMA_H2O_API char * llama_h2o_chat_apply(
        const struct llama_h2o_chat_template * tmpl, const char * request, char ** error);

// Create a parser for answers to a prompt.
//   params  { format, generation_prompt, parser } of llama_h2o_chat_apply()
LLAMA_H2O_API struct llama_h2o_chat_parser * llama_h2o_chat_parser_init(const char * params, char ** error);

LLAMA_H2O_API void llama_h2o_chat_parser_free(struct llama_h2o_chat_parser * parser);

// Parse a complete or partial answer, which includes the texts of special tokens.
//   text  [size]
// Returns { failed: the text does not match the template, all other fields are empty; end: of the parsed text;
//   reasoning_content; content; tool_calls: [{ id, name, arguments }];
//   nodes: [{ tag: "reasoning", "content" or "tool"; begin; end; plain: the span contains no markup }] }
// Offsets are in bytes of the text; they are negative in the generation prompt.
LLAMA_H2O_API char * llama_h2o_chat_parse(
        const struct llama_h2o_chat_parser * parser, const char * text, size_t size, char ** error);

#ifdef __cplusplus
}
#endif

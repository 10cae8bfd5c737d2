// Chats by llama.cpp's own templates and parsers (common/chat.h): messages become a prompt, and what a model writes is told
// apart into thoughts, an answer and calls of tools, by the marks of its template.
//
// Texts are UTF-8; requests and results are JSON, in the words of OpenAI where they have some. A result is to be freed with
// llama_h2o_chat_text_free(). Functions return null where they fail; *error is then a text that says why, to be freed
// likewise, or null if memory is short. No exception leaves this interface. What was made may be used from several threads
// at once.

#pragma once

#include "llama-h2o.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llama_h2o_chat_template;
struct llama_h2o_chat_parser;

LLAMA_H2O_API void llama_h2o_chat_text_free(char * text);

// A template in Jinja, with the texts of the tokens that it may write.
LLAMA_H2O_API struct llama_h2o_chat_template * llama_h2o_chat_template_init(
        const char * source, const char * bos, const char * eos, char ** error);

LLAMA_H2O_API void llama_h2o_chat_template_free(struct llama_h2o_chat_template * tmpl);

// The prompt that calls for an answer.
//   request  { messages, tools, tool_choice: "auto", "required" or "none", parallel_tool_calls, json_schema,
//              enable_thinking, chat_template_kwargs, continue_final_message: the last message is the beginning of the
//              answer, or of its thoughts if it has nothing else }, all but the messages optional
// Returns { prompt, generation_prompt: its end, which calls for the answer or begins it, grammar: "" for none, grammar_lazy: it holds
//   from one of triggers [{ type, value }] on, stops, preserved_tokens: texts of special tokens that the parser looks at,
//   supports_thinking, thinking_start_tag, thinking_end_tags, format and parser: for llama_h2o_chat_parser_init(),
//   marks: texts that end a stretch of plain text, caps: { name: bool }, of the template }
LLAMA_H2O_API char * llama_h2o_chat_apply(
        const struct llama_h2o_chat_template * tmpl, const char * request, char ** error);

// A parser of the answers to a prompt.
//   params  { format, generation_prompt, parser } of llama_h2o_chat_apply()
LLAMA_H2O_API struct llama_h2o_chat_parser * llama_h2o_chat_parser_init(const char * params, char ** error);

LLAMA_H2O_API void llama_h2o_chat_parser_free(struct llama_h2o_chat_parser * parser);

// An answer as far as it was written, with the text of its special tokens.
//   text  [size]
// Returns { failed: the text does not fit the template; the rest is then empty, end: of what was understood,
//   reasoning_content, content, tool_calls: [{ id, name, arguments }],
//   nodes: [{ tag: "reasoning", "content" or "tool", begin, end, plain: its text as it stands }] }
// Places in the text are bytes; they are negative in the generation prompt.
LLAMA_H2O_API char * llama_h2o_chat_parse(
        const struct llama_h2o_chat_parser * parser, const char * text, size_t size, char ** error);

#ifdef __cplusplus
}
#endif

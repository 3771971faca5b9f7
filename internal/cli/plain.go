package cli

import (
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line is a text as a terminal may show it, in one line. Messages, names and events come from nodes, from tenants and from what is
// in their filesystems. What is no letter, mark, number, sign or space is written as Go does (\x1b), so that none of it moves the
// cursor, hides or recolours what others said, or reverses its order.
func Line(text string) string {
	if strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) < 0 {
		return text
	}
	var out strings.Builder
	for at := 0; at < len(text); {
		r, size := utf8.DecodeRuneInString(text[at:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&out, `\x%02x`, text[at])
		case unicode.IsPrint(r):
			out.WriteRune(r)
		case unicode.IsSpace(r):
			out.WriteByte(' ')
		default:
			out.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
		at += size
	}
	return out.String()
}

// Lines is Line for text of several lines.
func Lines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = Line(lines[i])
	}
	return strings.Join(lines, "\n")
}

// Plain returns a writer for lines that another program says: each is written as Line has it. Close writes a last one that has
// no end, and closes nothing.
func Plain(to io.Writer) io.WriteCloser { return &plainWriter{to: to} }

type plainWriter struct {
	to   io.Writer
	line []byte // that has not ended
}

// longestLine is how much of a line is kept before it is written all the same, in bytes.
const longestLine = 64 << 10

func (p *plainWriter) Write(b []byte) (int, error) {
	for _, c := range b {
		if c != '\n' {
			p.line = append(p.line, c)
		}
		if c == '\n' || len(p.line) >= longestLine {
			if _, err := fmt.Fprintln(p.to, Line(string(p.line))); err != nil {
				return 0, err
			}
			p.line = p.line[:0]
		}
	}
	return len(b), nil
}

func (p *plainWriter) Close() error {
	if len(p.line) == 0 {
		return nil
	}
	_, err := io.WriteString(p.to, Line(string(p.line)))
	p.line = nil
	return err
}

// plainly makes a Line of every text within a value, which v points to.
func plainly(v any) { plainlyIn(reflect.ValueOf(v).Elem()) }

func plainlyIn(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		if v.CanSet() {
			v.SetString(Line(v.String()))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			plainlyIn(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() { // those of others' types (time.Time) are their own
				plainlyIn(v.Field(i))
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			plainlyIn(v.Index(i))
		}
	case reflect.Map: // a new one: what it holds cannot be set, and it may be somebody else's, too
		if v.IsNil() {
			return
		}
		texts := reflect.MakeMapWithSize(v.Type(), v.Len())
		for key, value := range v.Seq2() {
			texts.SetMapIndex(plainCopy(key), plainCopy(value))
		}
		v.Set(texts)
	}
}

// plainCopy is a value of a map as plainly makes it.
func plainCopy(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	plainlyIn(c)
	return c
}

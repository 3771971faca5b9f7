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

// Line returns a text as a terminal may show it, in one line. Messages, names and events come from nodes, from tenants and from their filesystems. Spaces
// become blanks; other characters that are not printable are written as Go does (\x1b). So none of them moves the cursor, hides or recolours other text, or
// reverses its order.
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

// Lines is Line for a text of several lines.
func Lines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = Line(lines[i])
	}
	return strings.Join(lines, "\n")
}

// Plain returns a writer for the output of another program: each line is written as Line returns it. Close writes a last line without an end; it does not close
// to.
func Plain(to io.Writer) io.WriteCloser { return &plainWriter{to: to} }

type plainWriter struct {
	to   io.Writer
	line []byte // without its end yet
}

// longestLine is how many bytes of a line are kept before they are written as a line of their own.
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

// plainly replaces every text in the value that v points to by its Line.
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
			if v.Type().Field(i).IsExported() { // other packages' types (time.Time) keep theirs
				plainlyIn(v.Field(i))
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			plainlyIn(v.Index(i))
		}
	case reflect.Map: // a new map: its values cannot be set, and others may use it too
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

// plainCopy returns a copy of a value with plain texts.
func plainCopy(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	plainlyIn(c)
	return c
}

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// relisting is a transport that makes the cache list anew if the API server refused the connection of a watch, or is at an earlier version than the one
// from which the watch goes on. Otherwise client-go would watch from the last version that it saw: if etcd was restored from a backup meanwhile, it would
// miss changes until etcd reaches that version again. After any other error of a watch client-go lists anew by itself, except after "too many requests",
// when it comes here again.
type relisting struct{ http.RoundTripper }

func (r relisting) RoundTrip(q *http.Request) (*http.Response, error) {
	if !q.URL.Query().Has("watch") {
		return r.RoundTripper.RoundTrip(q)
	}
	answer, err := r.reached(q)
	if answer == nil && err == nil {
		answer, err = r.RoundTripper.RoundTrip(q)
	}
	if utilnet.IsConnectionRefused(err) {
		err = errors.New(err.Error()) // without the errno, by which client-go would recognize it
	}
	return answer, err
}

// lookTimeout is how long reached waits for the API server.
const lookTimeout = 30 * time.Second

// reached returns an error if the API server is at an earlier version than the one from which a watch goes on. If the API server answers with another
// status than 200 OK, it returns that answer, to be used for the watch: so a server that is busy is not asked for a whole list. A watch that begins with a
// list (sendInitialEvents) needs no such check.
func (r relisting) reached(watch *http.Request) (*http.Response, error) {
	from, err := strconv.ParseUint(watch.URL.Query().Get("resourceVersion"), 10, 64)
	if err != nil || watch.URL.Query().Has("sendInitialEvents") {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(watch.Context(), lookTimeout)
	defer cancel()
	q := watch.Clone(ctx)
	// No object has this name. Of a list of one name the API server reads that one alone: of a list with a limit it goes through all that there are, which
	// of 50,000 objects takes it more than a second of a processor.
	q.URL.RawQuery = "fieldSelector=metadata.name%3D-"
	q.Header.Set("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
	answer, err := r.RoundTripper.RoundTrip(q)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, fmt.Errorf("look how far %s has come: %w", watch.URL.Path, err)
	}
	if answer.StatusCode != http.StatusOK {
		answer.Body = io.NopCloser(bytes.NewReader(said))
		return answer, nil
	}
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(said, &list); err != nil {
		return nil, fmt.Errorf("look how far %s has come: %w", watch.URL.Path, err)
	}
	if now, err := strconv.ParseUint(list.ResourceVersion, 10, 64); err != nil || now < from {
		return nil, fmt.Errorf("%s is at version %q, and the watch at %d: etcd was restored", watch.URL.Path, list.ResourceVersion, from)
	}
	return nil, nil
}

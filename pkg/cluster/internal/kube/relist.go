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

// relisting has the cache list anew where the API server refused a connection for a watch, or has not come
// as far as the watch is to begin. client-go would watch on from the last version that it saw, so if etcd was
// restored meanwhile, it would not see what that changed before etcd has come as far again; with any other error
// of a watch it lists anew by itself, but for "too many requests", after which it comes here again.
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
		err = errors.New(err.Error()) // client-go knows it by the errno inside
	}
	return answer, err
}

// lookTimeout is how long the API server may take to say how far it has come.
const lookTimeout = 30 * time.Second

// reached fails if the API server has not come as far as the version from which a watch goes on. An answer is one
// that does not say how far that is; it is for the watch too, so that a server that is busy is not asked for all
// that there is. A watch that begins with that needs no such look.
func (r relisting) reached(watch *http.Request) (*http.Response, error) {
	from, err := strconv.ParseUint(watch.URL.Query().Get("resourceVersion"), 10, 64)
	if err != nil || watch.URL.Query().Has("sendInitialEvents") {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(watch.Context(), lookTimeout)
	defer cancel()
	q := watch.Clone(ctx)
	q.URL.RawQuery = "limit=1"
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
